"""Network families, each with a configuration class and pure functions."""
