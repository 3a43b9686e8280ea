"""Families of networks, each a configuration that gives pure functions."""
