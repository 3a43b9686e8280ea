"""The digest that a JSON file of a pack contains of itself: of the manifest, and of each record of the journal.

It detects damage and edits by hand. It is not a signature: anyone can recompute it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def json_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, hexadecimal. The order of its keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
