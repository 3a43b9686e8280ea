"""Programs and commands of the pages of docs/howto, which tests run."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_PAGES = Path(__file__).parents[1] / "docs/howto"


def page_program(page: str, word: str, replaced: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the program in Python of a page that has this word, with other texts in the place of some of its own."""
    text = (_PAGES / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (program,) = (block for block in blocks if word in block)
    for old, new in replaced.items():
        assert old in program
        program = program.replace(old, new)
    return program


def page_commands(page: str, command: str) -> list[list[str]]:
    """Return the arguments of each line of a page that runs a command, without its comment."""
    lines = (_PAGES / page).read_text(encoding="utf-8").splitlines()
    return [line.partition("#")[0].split()[1:] for line in lines if line.startswith(f"{command} ")]
