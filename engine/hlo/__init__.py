"""XLA's optimised programs, read from their text: computations, instructions, their scopes and their source lines."""
