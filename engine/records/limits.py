"""The limits on what is read from a run folder's files. Imports nothing, so that `tail-run` starts quickly."""

LONGEST_LINE_BYTES = 1 << 16
"""The longest line of a log."""
MOST_JSON_BYTES = 1 << 24
"""The largest `config.json` or `result.json`: a launch adds some hundred bytes."""
