"""Attacks the project's commands with seeded faults, and judges from outside what they made of them."""
