"""Digest of JSON objects. The manifest of a pack and each record of its journal contain their own digests.

A digest detects damage and manual edits. It is not a signature: anyone can recompute it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def json_digest(values: Mapping[str, Any]) -> str:
    """Return the hexadecimal SHA-256 of a JSON object. The order of its keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
