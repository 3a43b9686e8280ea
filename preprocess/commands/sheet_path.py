"""Where a sheet of pictures can be written. Loads nothing, so that a command can check its options at once."""

import os
from pathlib import Path


def check_sheet_path(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless a sheet can be written to a path, as far as can be seen before it is drawn."""
    where = Path(path)
    if where.suffix.lower() != ".png":
        raise ValueError(f"a sheet of pictures is written as PNG, got {where}: give a name that ends with .png")
    if not where.absolute().parent.is_dir():
        raise ValueError(f"{where} must be in a folder that exists, but {where.parent} does not: create it first")
    if where.is_dir():
        raise ValueError(f"{where} must be a file, but is a folder: give another name")
