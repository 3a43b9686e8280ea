"""The packed format: its files, and how they are read and verified."""
