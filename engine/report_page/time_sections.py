"""The sections about what took the time: goodput, waits, slow operations, and the profile."""

from collections.abc import Sequence

from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.layout import bar, each_run, section
from loopfeed.engine.report_page.markup import Html, Node, folded, join, paragraph, table
from loopfeed.engine.report_page.number_text import brief, duration, percent, whole
from loopfeed.engine.report_page.profile import ProfileEntry, ProfileTable
from loopfeed.engine.report_page.spent import Spent
from loopfeed.engine.report_page.subject import Subject
from loopfeed.engine.runtime.record import LaunchRuntime

_MOST_OPERATIONS = 50


def goodput_section(subjects: Sequence[Subject]) -> Html:
    """Return how much of the wall time was spent on what, and what the newest launch waited for."""

    def of_run(subject: Subject) -> Html:
        spent = subject.facts.spent
        assert isinstance(spent, Spent)
        total = sum(spent.seconds.values())
        rows = [
            (name, bar(100 * seconds / total), f"{100 * seconds / total:.1f} %", duration(seconds))
            for name, seconds in spent.seconds.items()
        ]
        columns = ("spent on", "share", "%", "time")
        runtime = subject.facts.runtime
        return join(
            table(columns, rows, caption=f"{duration(total)} of {spent.of_what}", numbers=(2, 3), class_="bars"),
            paragraph(spent.note, class_="note") if spent.note else None,
            None if isinstance(runtime, Absent) else _of_launch(runtime.last),
        )

    return section("goodput", "Goodput", each_run(subjects, lambda each: each.facts.spent, of_run))


def _of_launch(launch: LaunchRuntime) -> Html:
    """Return tables of what was slow in a launch; none of what was not."""
    stalls = [(f"{each.step:,}", brief(each.wait_s), each.stage, each.shard or "–") for each in launch.stalls]
    slow = [
        (each.name, each.kind, each.shape, f"{each.count:,}", each.why)
        for each in launch.slow_operations[:_MOST_OPERATIONS]
    ]
    peaks = {"process": launch.memory.host, "device": launch.memory.device, "program": launch.memory.program}
    memory = [(name, f"{size / 1e6:,.0f} MB") for name, size in peaks.items() if size is not None]
    stall_columns, slow_columns = ("step", "waited", "at fault", "file"), ("operation", "kind", "shape", "count", "why")
    longest = "The longest waits for batches"
    return join(
        folded(longest, table(stall_columns, stalls, caption=longest, numbers=(0, 1))) if stalls else None,
        table(slow_columns, slow, caption="Operations without a fast kernel", numbers=(3,)) if slow else None,
        table(("memory of", "at most"), memory, caption="Memory", numbers=(1,)) if memory else None,
    )


def profile_section(subjects: Sequence[Subject]) -> Html:
    """Return the tables of the profiler, with a bar for the share of each row."""

    def of_run(subject: Subject) -> Html:
        profile = subject.facts.profile
        assert isinstance(profile, ProfileTable)
        actions = _profile_table(profile.actions, "Phases and actions", has_scopes=False)
        note = None
        if any(each.is_estimated for each in profile.actions):
            note = paragraph("* measured in the traced steps only, and taken for all.", class_="note")
        if not profile.scopes:
            return join(actions, note)
        scopes = _profile_table(profile.scopes, "Parts of the model inside the actions", has_scopes=True)
        return join(actions, note, folded("Parts of the model", scopes))

    return section("profile", "Profile", each_run(subjects, lambda each: each.facts.profile, of_run, is_wide=True))


def _profile_table(entries: Sequence[ProfileEntry], caption: str, *, has_scopes: bool) -> Html:
    rows: list[list[Node]] = []
    for each in entries:
        action = f"{each.action}{'*' * each.is_estimated}"
        names: list[Node] = [each.phase, action, each.scope] if has_scopes else [each.phase, action]
        deviation = brief(each.std_s) if each.calls > 1 else "–"
        figures = (brief(each.mean_s), deviation, whole(each.calls), whole(each.samples_per_s), brief(each.total_s))
        rows.append([*names, *figures, percent(each.percent / 100, 1), bar(each.percent)])
    headings = ("phase", "action", "scope") if has_scopes else ("phase", "action")
    columns = (*headings, "mean", "std. dev.", "calls", "images/s", "total", "% of total", "")
    numbers = range(len(headings), len(columns) - 1)
    return table(columns, rows, caption=caption, numbers=numbers, class_="bars wide")
