"""How much of a run folder's files is read at most. Imports nothing, so that whoever follows a run starts quickly."""

LONGEST_LINE_BYTES = 1 << 16
"""No line of a log is longer."""
MOST_JSON_BYTES = 1 << 24
"""No `config.json` or `result.json` is larger: a launch adds some hundred bytes."""
