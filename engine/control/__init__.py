"""Requests to a run in progress, and the control word (the message that passes them to the compiled program)."""
