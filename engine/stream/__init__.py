"""The stream of emitted records to the terminal, files and the user's own sinks."""
