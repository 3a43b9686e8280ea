"""Families of networks: a configuration and pure functions for each."""
