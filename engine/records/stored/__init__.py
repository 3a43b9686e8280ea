"""A run folder in an object store: its format, who may write it, how it is uploaded, and how it is read."""
