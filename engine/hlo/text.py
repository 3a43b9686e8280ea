"""The parser of XLA's text of an optimised program (`jax.stages.Compiled.as_text`).

jaxlib's own objects (`hlo_modules`) have neither the scopes nor the source lines of instructions, and which
computations they call; the text has. A line that is not understood is skipped, so that a newer XLA loses details only.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from loopfeed.engine.hlo.program import Array, Computation, HloProgram, Instruction, Source

_MODULE = re.compile(r"HloModule ([^\s,]+)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{([\d,]*)([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|select|scatter|true_computation|false_computation|branch_computations"
    r"|called_computations)=(%?[\w.\-]+|\{[^{}]*\})"
)
_METADATA = re.compile(r",?\s*metadata=\{((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PLACE = re.compile(r'source_file="((?:[^"\\]|\\.)*)".*?source_line=(\d+)')
_ENTRY = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})\s*$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NO_OPERANDS = frozenset({"constant", "parameter"})


def parse_hlo(text: str) -> HloProgram:
    """Return the program that a text describes.

    Args:
        text: the text of an optimised program, as `jax.stages.Compiled.as_text()` returns it, also of a part of one.

    The text of a program of ResNet-50 is parsed in about a second.
    """
    reader = _Reader()
    header = ""
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        else:
            reader.read(line)
    found = _MODULE.match(header)
    return HloProgram("" if found is None else found[1], reader.computations(), reader.frames(), header)


def arrays_of(text: str) -> tuple[Array, ...]:
    """Return the arrays of a type in HLO's notation, those of a tuple one after the other."""
    return tuple(
        Array(dtype, _numbers(sizes), _numbers(layout), _space(more))
        for dtype, sizes, layout, more in _ARRAY.findall(text)
    )


class _Reader:
    """Collects computations and tables line by line."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self._table: dict[int, str] | None = None
        self._parts: dict[str, list[Instruction]] = {}
        self._entry = ""
        self._here = ""
        # Places that metadata name themselves, as XLA wrote them before it had tables of them.
        self._inline: dict[tuple[str, int], int] = {}

    def read(self, line: str) -> None:
        if (found := _INSTRUCTION.match(line)) is not None:
            if self._here and (instruction := self._instruction(line, found)) is not None:
                self._parts[self._here].append(instruction)
        elif line in self._tables:
            self._table = self._tables[line]
        elif self._table is not None and (entry := _ENTRY.match(line)) is not None:
            self._table[int(entry[1])] = entry[2] if entry[2] is not None else entry[3]
        elif (head := _HEADER.match(line)) is not None:
            self._table, self._here = None, head[2]
            self._parts[self._here] = []
            if head[1]:
                self._entry = head[2]
        elif line.startswith("}"):
            self._here = ""

    def computations(self) -> Mapping[str, Computation]:
        return MappingProxyType(
            {name: Computation(name, tuple(part), name == self._entry) for name, part in self._parts.items()}
        )

    def frames(self) -> Mapping[int, tuple[Source, int]]:
        files, functions, places, frames = (self._tables[name] for name in _TABLES)
        found: dict[int, tuple[Source, int]] = {}
        for number, text in frames.items():
            place = _fields(places.get(_fields(text).get("file_location_id", 0), ""))
            source = Source(
                files.get(place.get("file_name_id", 0), ""),
                functions.get(place.get("function_name_id", 0), ""),
                place.get("line", 0),
            )
            # A frame without a caller names itself.
            found[number] = source, _fields(text).get("parent_frame_id", number)
        found |= {number: (Source(file, "", line), number) for (file, line), number in self._inline.items()}
        return MappingProxyType(found)

    def _instruction(self, line: str, found: re.Match[str]) -> Instruction | None:
        """Return the instruction of a line, None if the line does not have the form of one."""
        line = _COMMENT.sub("", line)
        start = found.end()
        end = _end_of_group(line, start) if line.startswith("(", start) else line.find(" ", start)
        opcode = None if end < 0 else _OPCODE.match(line, end)
        if opcode is None:
            return None
        close = _end_of_group(line, opcode.end() - 1)
        if close < 0:
            return None
        inner, rest = line[opcode.end() : close - 1], line[close:].lstrip(", ")
        metadata = _METADATA.search(rest)
        about = "" if metadata is None else metadata[1]
        rest = rest if metadata is None else rest[: metadata.start()] + rest[metadata.end() :]
        op_name = _OP_NAME.search(about)
        has_operands = opcode[1] not in _NO_OPERANDS
        return Instruction(
            name=found[2],
            opcode=opcode[1],
            results=arrays_of(line[start:end]),
            operands=tuple(_NAME.findall(inner)) if has_operands else (),
            literal="" if has_operands else inner,
            computation=self._here,
            is_root=found[1] is not None,
            calls=tuple(_called(rest)),
            op_name="" if op_name is None else op_name[1].replace('\\"', '"'),
            frame=self._frame(about),
            attributes=rest,
        )

    def _frame(self, about: str) -> int:
        if (frame := _FRAME.search(about)) is not None:
            return int(frame[1])
        if (place := _PLACE.search(about)) is None:
            return 0
        # Numbers below zero, so that they are none of a table's.
        return self._inline.setdefault((place[1], int(place[2])), -1 - len(self._inline))


def _called(attributes: str) -> Iterator[tuple[str, str]]:
    for role, names in _CALLS.findall(attributes):
        for name in names.strip("{}").split(","):
            yield role, name.strip().removeprefix("%")


def _end_of_group(line: str, start: int) -> int:
    """Return the position behind the parenthesis that closes the one at `start`; -1 if none does."""
    depth = 0
    for found in re.compile(r"[()]").finditer(line, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return -1


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}


def _space(layout: str) -> int:
    found = _SPACE.search(layout) if layout else None
    return 0 if found is None else int(found[1])


def _numbers(text: str) -> tuple[int, ...]:
    # A bounded dynamic size is written <=8.
    return tuple(int(each) for each in re.findall(r"\d+", text))
