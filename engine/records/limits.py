"""Size limits for reading the files of a run folder. The module imports nothing, so that `tail-run` starts quickly."""

LONGEST_LINE_BYTES = 1 << 20
"""The maximum length of a line of a log."""
MOST_JSON_BYTES = 1 << 24
"""The maximum size of `config.json` or `result.json`: each launch adds a few hundred bytes."""
