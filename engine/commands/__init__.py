"""The commands: they turn options into settings, streams into terminal output, errors into one line."""
