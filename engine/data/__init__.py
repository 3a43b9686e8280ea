"""The data of a run: which they are, their cache, and whether the settings fit them."""
