"""The commands, which convert options to settings, show losses on the terminal, and report each error in one line."""
