"""The log of control events: golden lines, strict reading, crashes, and its use by a replay."""

import dataclasses
import errno
import hashlib
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.control.request import ControlEvent, events_at, factor_before
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, ControlLog, read_events


def event(pull=0, factor=None, **changes):
    values = {"snapshot": False, "evaluate": False, "stop": False, "request": "a", "time": 1763712000.5}
    return ControlEvent(**({"pull": pull, "step": pull + 1, "learning_rate_factor": factor} | values | changes))


def write_all(path, *events):
    log = ControlLog(path)
    for each in events:
        log.append(each)
    log.close()


GOLDEN = (
    b'{"pull": 512, "step": 513, "learning_rate_factor": 0.1, "snapshot": true, "evaluate": false, "stop": false, '
    b'"request": "a-1", "time": 1763712000.987}\n'
    b'{"pull": 600, "step": 601, "learning_rate_factor": null, "snapshot": false, "evaluate": false, "stop": true, '
    b'"request": "b_2", "time": 1763712100.0}\n'
)


def test_golden_file(tmp_path):
    path = tmp_path / CONTROL_LOG_NAME
    events = (
        event(512, 0.1, snapshot=True, request="a-1", time=1763712000.987),
        event(600, stop=True, request="b_2", time=1763712100.0),
    )
    write_all(path, *events)
    before = b""
    for line, wanted in zip(path.read_bytes().splitlines(keepends=True), GOLDEN.splitlines(), strict=True):
        values = json.loads(wanted)
        told = {"before": hashlib.sha256(before).hexdigest(), "values": values}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        assert line == wanted[:-1] + b', "sha256": "' + digest.encode() + b'"}\n'
        before += line
    assert read_events(path) == events
    assert CONTROL_LOG_NAME == "control.jsonl"


@pytest.mark.parametrize("damage", ["change", "remove", "exchange", "repeat"])
def test_a_changed_removed_or_moved_line_is_detected(tmp_path, damage):
    path = tmp_path / CONTROL_LOG_NAME
    write_all(path, *(event(pull, 0.5) for pull in range(4)))
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "change":
        lines[1] = lines[1].replace(b"0.5", b"0.6")
    elif damage == "remove":
        del lines[1]
    elif damage == "exchange":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines.insert(1, lines[1])
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"line [23] of .*control\.jsonl is not a valid event .*was changed"):
        read_events(path)


def test_a_line_without_a_digest_is_refused_after_one_with_a_digest(tmp_path):
    path = tmp_path / CONTROL_LOG_NAME
    path.write_bytes(GOLDEN)
    write_all(path, event(700))
    with path.open("ab") as file:
        file.write(GOLDEN.splitlines(keepends=True)[0])
    with pytest.raises(
        ValueError,
        match=r"line 4 of .*control\.jsonl is not a valid event "
        r"\(must have the fields .*, but these are missing or unknown: sha256\)",
    ):
        read_events(path)


WRONG: dict[str, list[object]] = {
    "pull": [-1, 2**31, 1.0, True, None, "1"],
    "step": [0, -1, 2**31, 1.0, True, None],
    "learning_rate_factor": [-0.1, math.nan, math.inf, 1e39, 1e-39, 10**400, True, "0.1", []],
    "snapshot": [0, 1, None, "true"],
    "evaluate": [0, None],
    "stop": [1, None],
    "request": ["", "a/b", "..", "a.json", "a" * 101, "é", "a\n", 1, None],
    "time": [-1.0, math.nan, math.inf, None, "now", True, 10**400],
}
LINES = [
    pytest.param(name, value, id=f"{name}-{number}")
    for name, values in WRONG.items()
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("name", "value"), LINES)
def test_an_event_out_of_range_is_neither_created_nor_read(name, value):
    with pytest.raises(ValueError, match=name.replace("request", "request's id")):
        dataclasses.replace(event(), **{name: value})
    line = json.dumps(dataclasses.asdict(event()) | {name: value})
    with pytest.raises(ValueError, match=name.replace("request", "request's id")):
        ControlEvent.from_json(line)


def without(name):
    return json.dumps({key: value for key, value in dataclasses.asdict(event()).items() if key != name})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "must be a JSON object, but is of type list"),
        ("null", "must be a JSON object, but is of type NoneType"),
        (without("stop"), "must have the fields pull, step, .*, but these are missing or unknown: stop$"),
        (event().to_json()[:-1] + ', "more": 1}', "missing or unknown: more"),
        (event().to_json()[:-1] + ', "stop": true}', "each field once"),
        (event().to_json() + "x", "Extra data"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "codec can't decode"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_an_invalid_event_is_named_with_file_and_line(tmp_path, line, message):
    path = tmp_path / CONTROL_LOG_NAME
    content = line.encode() if isinstance(line, str) else line
    path.write_bytes(GOLDEN + content + b"\n" + GOLDEN)
    with pytest.raises(ValueError, match=message):
        ControlEvent.from_json(line)
    with pytest.raises(ValueError, match=r"line 3 of .*control\.jsonl is not a valid event \("):
        read_events(path)


def test_a_log_truncated_by_a_crash_keeps_its_whole_lines_and_can_be_appended_to(tmp_path):
    for length in range(1, len(GOLDEN)):
        path = tmp_path / f"{length}.jsonl"
        path.write_bytes(GOLDEN[:length])
        whole = GOLDEN[:length].count(b"\n")
        kept = read_events(path)
        assert len(kept) == whole
        write_all(path, event(700))
        assert read_events(path) == (*kept, event(700))
        assert path.read_bytes().startswith(b"".join(GOLDEN.splitlines(keepends=True)[:whole]))


def test_a_full_disk_leaves_whole_lines_and_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / CONTROL_LOG_NAME
    log = ControlLog(path)
    log.append(event(0))
    first = path.read_bytes()
    write, room = os.write, [20]

    def write_what_fits(file, content):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, content[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_what_fits)
        with pytest.raises(OSError, match="No space left"):
            log.append(event(1))
        assert path.read_bytes() == first
    log.append(event(2))
    log.close()
    assert read_events(path) == (event(0), event(2))


def test_a_log_that_could_not_be_opened_is_opened_later(tmp_path):
    path = tmp_path / "run" / CONTROL_LOG_NAME
    log = ControlLog(path)
    with pytest.raises(FileNotFoundError):
        log.append(event(0))
    path.parent.mkdir()
    log.append(event(1))
    log.close()
    assert read_events(path) == (event(1),)


# --- what a replay takes from it

FEW = st.lists(st.tuples(st.integers(0, 5), st.none() | st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])), max_size=12)


@given(FEW, st.integers(0, 7))
def test_the_factor_before_a_pull_is_that_of_a_board_which_lived_through_all_pulls(few, pull):
    events = [event(at, factor) for at, factor in few]
    factor = 1.0
    for at in range(pull):
        for each in events_at(events, at):
            factor = factor if each.learning_rate_factor is None else each.learning_rate_factor
    assert factor_before(events, pull) == factor
    assert factor_before(iter(events), pull) == factor


def test_the_later_line_wins_at_one_pull_and_the_later_pull_wins_over_a_later_line():
    events = (event(5, 0.5), event(5, 0.25), event(5), event(3, 2.0), event(9, 0.0))
    factors = {pull: factor_before(events, pull) for pull in (0, 3, 4, 5, 6, 9, 10)}
    assert factors == {0: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 0.25, 9: 0.25, 10: 0.0}
    assert events_at(events, 5) == events[:3]
    assert events_at(events, 4) == ()
