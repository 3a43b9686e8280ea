"""The digest that a JSON file of a pack carries of itself: the manifest's, and that of each record of the journal.

It guards against damage and edits by hand. Whoever recomputes it can forge any of it: it is no signature.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def json_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, hexadecimal; the order of its keys plays no part."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
