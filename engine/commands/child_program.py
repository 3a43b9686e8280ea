"""Programs for `python -c` in child processes of the commands."""


def child_program(module: str, function: str, call: str) -> str:
    """Return a program that imports a function and evaluates the call of it.

    The working directory is not among its modules, as for an installed command: they could hide those of Python.
    """
    return f"import sys; sys.path[:] = filter(None, sys.path); from {module} import {function}; {call}"
