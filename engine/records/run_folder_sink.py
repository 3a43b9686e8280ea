"""The sink that writes a run folder's `loss.jsonl` and `eval.jsonl`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from loopfeed.engine.crossing.pushed import PushedSnapshot
from loopfeed.engine.records.digests import LogState, RunningDigest
from loopfeed.engine.records.json_lines import JsonLines
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord


class RunFolderSink:
    """A sink that writes `loss.jsonl` and, from the first evaluation on, `eval.jsonl`.

    Args:
        loss_log, evaluation_log: the files.
        take_snapshot: called with each snapshot once the lines before it are on disk, so that a run that is resumed
            from it has them.
        leave_out: called on the program's thread with the step of a snapshot that is dropped because another one is
            still waiting for its lines.
        begun: the digest of each file's current content; a missing digest is computed from the file.
        needs_snapshots: as of `loopfeed.Sink`.

    Attributes:
        last_step: the step of the last loss that was written, None before the first.
        num_evaluations: how many evaluations were written.
    """

    def __init__(
        self,
        loss_log: Path,
        evaluation_log: Path,
        take_snapshot: Callable[[PushedSnapshot], None] | None = None,
        leave_out: Callable[[int], None] = lambda _: None,
        begun: Mapping[Path, RunningDigest] | None = None,
        *,
        needs_snapshots: bool = False,
    ) -> None:
        self._losses, self._evaluations = (
            JsonLines(path, (begun or {}).get(path)) for path in (loss_log, evaluation_log)
        )
        self._names = loss_log.name, evaluation_log.name
        self._take_snapshot, self._leave_out = take_snapshot, leave_out
        self._has_evaluations, self.needs_snapshots = False, needs_snapshots
        self.last_step: int | None = None
        self.num_evaluations = 0

    def open(self) -> None:
        """Open the loss log."""
        self._losses.open()

    def write(self, record: LossRecord) -> None:
        """Append a loss."""
        self._losses.append(record.to_json())
        self.last_step = record.step

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Append an evaluation."""
        if not self._has_evaluations:
            self._losses.check_place()  # create no file in a folder that another run has locked since
            self._evaluations.open()
            self._has_evaluations = True
        self._evaluations.append(record.to_json())
        self.num_evaluations += 1

    def write_snapshot(self, snapshot: PushedSnapshot) -> None:
        """Sync the written lines to the disk and pass the snapshot on."""
        if self._take_snapshot is not None:
            self.sync()
            self._take_snapshot(snapshot)

    def leave_out(self, snapshot: PushedSnapshot) -> None:
        """Report a snapshot that will not be written."""
        self._leave_out(snapshot.step)

    def sync(self) -> None:
        """Sync the written lines to the disk."""
        self._losses.sync()
        self._evaluations.sync()

    def states(self) -> dict[str, LogState]:
        """Return the state of each file by name; a file that does not exist yet has the state of an empty file."""
        return dict(zip(self._names, (self._losses.state(), self._evaluations.state()), strict=True))

    def close(self) -> None:
        """Sync and close both files; raise LostFileError if either was removed or replaced."""
        try:
            self.sync()
        finally:
            self._losses.close()
            self._evaluations.close()
