"""The commands: options to settings, streams to terminals, errors to one line."""
