"""Compilation of programs ahead of time, and the cache of compiled programs."""
