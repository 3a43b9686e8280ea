"""What the program emits, on its way to the terminal, files and the user's own sinks."""
