"""The sections about what a run was made of: settings, data set, software, devices, launches and requests."""

from collections.abc import Sequence
from typing import Any

from loopfeed.engine.config import SETTINGS, describe_value
from loopfeed.engine.control.event import ControlEvent
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.records.topology import Topology
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.data_card import DataCard, SplitCard
from loopfeed.engine.report_page.layout import absences, bar, each_run, section
from loopfeed.engine.report_page.markup import Html, Node, folded, join, paragraph, table, tag
from loopfeed.engine.report_page.number_text import duration, moment
from loopfeed.engine.report_page.subject import Subject
from loopfeed.engine.runtime.record import LaunchRuntime
from loopfeed.engine.settings import Owner
from loopfeed.preprocess.quantities import quantity

_MOST_CLASSES, _MOST_EVENTS, _MOST_LAUNCHES = 24, 200, 50
_DEFAULT = "default"
# Where a run is written and how it is started say nothing about what it computed.
_OF_A_RUN = tuple(name for name, each in SETTINGS.items() if each.owner is not Owner.LAUNCH)


def settings_section(subjects: Sequence[Subject]) -> Html:
    """Return the settings that differ among the runs, those that were chosen, and all of them, with their origins."""
    recorded = [(each, each.facts.recorded) for each in subjects if isinstance(each.facts.recorded, RecordedRun)]
    content: list[Node] = []
    if len(recorded) > 1:
        content.append(_differing(recorded))
    chosen = [name for name in SETTINGS if any(_is_chosen(run, name) for _, run in recorded)]
    if recorded:
        caption = "Settings that are not left at their defaults"
        content.append(
            _settings(recorded, chosen, caption) if chosen else paragraph("All settings are at their defaults.")
        )
        content.append(folded("All settings", _settings(recorded, tuple(SETTINGS), "All settings")))
        content += [_earlier(subject, run) for subject, run in recorded if run.earlier]
    return section("settings", "Settings", *content, absences(subjects, lambda each: each.facts.recorded))


def _differing(recorded: Sequence[tuple[Subject, RecordedRun]]) -> Html:
    names = [name for name in _OF_A_RUN if len({describe_value(run.value_of(name)) for _, run in recorded}) > 1]
    if not names:
        return paragraph("All settings of the runs are the same.")
    rows = [(name, *(describe_value(run.value_of(name)) for _, run in recorded)) for name in names]
    columns = ("setting", *(subject.letter for subject, _ in recorded))
    return table(columns, rows, caption="Settings that differ")


def _is_chosen(run: RecordedRun, name: str) -> bool:
    value, origin = run.value_of(name), run.origins.get(name)
    if origin is None:
        return value != SETTINGS[name].default
    return value is not None and origin != _DEFAULT


def _settings(recorded: Sequence[tuple[Subject, RecordedRun]], names: Sequence[str], caption: str) -> Html:
    """Return a table of settings, for each run with the value and where it came from."""
    is_alone = len(recorded) == 1
    columns = ["setting"]
    for subject, _ in recorded:
        columns += ["value", "origin"] if is_alone else [subject.letter, f"origin of {subject.letter}"]
    rows = []
    for name in names:
        cells: list[Node] = [name]
        for _, run in recorded:
            cells += [_value(run, name), str(run.origins.get(name, "unknown"))]
        rows.append(cells)
    return table(columns, rows, caption=caption)


def _value(run: RecordedRun, name: str) -> str:
    """Return the value of a setting, and what it resolved to if it was left open."""
    value = run.value_of(name)
    text = describe_value(value)
    resolved = run.resolved.get("data_location" if name == "data" else name)
    if (value is None or value == "auto") and isinstance(resolved, int | float | str):
        return f"{text} → {describe_value(resolved)}"
    return text


def _earlier(subject: Subject, run: RecordedRun) -> Html:
    rows = []
    for launch in run.earlier[-_MOST_LAUNCHES:]:
        changed = "; ".join(f"{name} {describe_value(value)}" for name, value in launch["settings"].items())
        rows.append((f"up to step {launch['until_step']:,}", changed or "the same settings, on other devices"))
    return table(("launch", "what differed"), rows, caption=f"Earlier launches of {subject.letter}")


def data_section(subjects: Sequence[Subject]) -> Html:
    """Return the card of each run's data set; runs on the same one share it."""

    def of_run(subject: Subject) -> Html:
        card = subject.card
        assert isinstance(card, DataCard)
        for other in subjects[: subjects.index(subject)]:
            if other.card == card:
                return paragraph(f"The same data set as {other.letter}.")
        return join(paragraph(tag("code", card.location)), tag("div", map(_split, card.splits), class_="row"))

    return section("data", "Data set", each_run(subjects, lambda each: each.card, of_run))


def _split(card: SplitCard) -> Html:
    manifest = card.manifest
    rule = ", ".join(f"{key} {value}" for key, value in manifest.resize_rule.items())
    channels = [", ".join(f"{part:.4f}" for part in each) for each in (manifest.channel_mean, manifest.channel_std)]
    kind = None if manifest.targets is None else manifest.targets.kind
    counted = "numbers" if kind == "numbers" else "classes"
    same = {
        True: "what the run recorded",
        False: "not what the run recorded: it was packed anew since",
        None: "unknown: the run recorded no digest",
    }[card.is_same]
    rows: list[tuple[Node, Node]] = [
        ("images", f"{manifest.num_images:,}"),
        (counted, f"{manifest.num_classes:,}" + (" (several per image)" if kind == "classes" else "")),
        ("size", f"{manifest.width} × {manifest.height} px, made by {rule}"),
        ("mean, std of R, G, B", f"{channels[0]}; {channels[1]}"),
        ("source", f"SHA-256 of its listing {manifest.source_digest[:16]}…"),
        ("held out", _holdout(card)),
        ("could not be packed", f"{manifest.num_failures:,}"),
        ("content", same),
        ("packed with", ", ".join(f"{tool} {version}" for tool, version in manifest.tool_versions.items())),
    ]
    title = f"{card.name}, for {card.role}"
    return tag("div", table(("what", "value"), rows, caption=title), _class_counts(card), _failures(card))


def _holdout(card: SplitCard) -> str:
    rule = card.manifest.tool_versions.get("holdout")
    if rule is None:
        return "no rule recorded: the source has this split itself, or an early release held it out"
    return f"by rule {rule}, from the hashes of class and path"


def _class_counts(card: SplitCard) -> Html | None:
    """Return the number of images of each class; of many classes, only the smallest and largest numbers."""
    counts, classes = card.manifest.class_counts, card.manifest.classes
    if not counts:
        return None
    caption = f"Images of each class in {card.name}"
    if len(counts) > _MOST_CLASSES:
        middle = sorted(counts)[len(counts) // 2]
        return paragraph(f"{caption}: {min(counts):,} to {max(counts):,}, median {middle:,}.")
    most = max(*counts, 1)
    rows = [(each.name, bar(100 * count / most), f"{count:,}") for each, count in zip(classes, counts, strict=True)]
    return folded(caption, table(("class", "", "images"), rows, caption=caption, numbers=(2,), class_="bars"))


def _failures(card: SplitCard) -> Html | None:
    if not card.failures:
        return None
    caption = f"Images of {card.name} that could not be packed"
    more = card.manifest.num_failures - len(card.failures)
    note = paragraph(f"And {more:,} more, in failures.jsonl.", class_="note") if more > 0 else None
    return join(table(("image", "reason"), card.failures, caption=caption), note)


def environment_section(subjects: Sequence[Subject]) -> Html:
    """Return versions and devices, the launches and the requests of each run."""

    def of_run(subject: Subject) -> Html:
        recorded = subject.facts.recorded
        assert isinstance(recorded, RecordedRun)
        rows = [(name, str(value)) for name, value in recorded.versions.items()]
        rows += [("devices", _devices(recorded)), ("run", subject.facts.path)]
        if (parameters := _end_value(subject, "num_params")) is not None:
            rows.append(("parameters", f"{parameters:,}"))
        software = table(("what", "value"), rows, caption="Software and devices")
        return tag("div", software, tag("div", _launches(subject), _events(subject)), class_="row")

    return section("environment", "Environment", each_run(subjects, lambda each: each.facts.recorded, of_run))


def _end_value(subject: Subject, name: str) -> int | None:
    end = subject.facts.end
    value: Any = None if isinstance(end, Absent) else end.get(name)
    return value if type(value) is int else None


def _devices(recorded: RecordedRun) -> str:
    try:
        return str(Topology.from_json(recorded.resolved))
    except (KeyError, ValueError, TypeError):
        return "not recorded"


def _launches(subject: Subject) -> Html:
    runtime = subject.facts.runtime
    if isinstance(runtime, Absent):
        recorded = subject.facts.recorded
        num = 1 if isinstance(recorded, Absent) else max(len(recorded.continued) + 1, 1)
        return paragraph(f"{quantity(num, 'launch')}, at times that are not known: {runtime.reason}.", class_="absent")
    rows = [_launch(number, each) for number, each in enumerate(runtime.launches, 1)][-_MOST_LAUNCHES:]
    columns = ("launch", "started", "time", "steps", "state", "devices")
    more = len(runtime.launches) - len(rows)
    note = paragraph(f"And {more:,} before.", class_="note") if more else None
    return join(table(columns, rows, caption="Launches"), note)


def _launch(number: int, launch: LaunchRuntime) -> tuple[str, ...]:
    steps = f"{launch.start_step:,} → {launch.end_step:,}"
    return str(number), moment(launch.started), duration(launch.wall_s), steps, launch.state, launch.devices


def _events(subject: Subject) -> Html:
    events = subject.facts.events
    if isinstance(events, Absent):
        return paragraph(f"Nothing to show of its requests: {events.reason}.", class_="absent")
    if not events:
        return paragraph("No requests of control-run or callbacks took effect.")
    rows = [(f"{each.step:,}", _request(each), moment(each.time)) for each in events[:_MOST_EVENTS]]
    more = len(events) - len(rows)
    note = paragraph(f"And {more:,} more.", class_="note") if more else None
    return join(table(("step", "request", "time"), rows, caption="Requests that took effect"), note)


def _request(event: ControlEvent) -> str:
    parts = []
    if event.learning_rate_factor is not None:
        parts.append(f"learning-rate factor {event.learning_rate_factor:g}")
    parts += [name for name in ("snapshot", "evaluate", "stop") if getattr(event, name)]
    return ", ".join(parts) or "nothing"
