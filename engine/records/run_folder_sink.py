"""The sink that writes a run folder's `loss.jsonl` and `eval.jsonl`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.crossing.pushed import PushedSnapshot
from engine.records.digests import LogState, RunningDigest
from engine.records.json_lines import JsonLines
from engine.stream.sinks import EvaluationRecord, LossRecord


class RunFolderSink:
    """The run folder's `loss.jsonl` and `eval.jsonl`; the second is made when there is something to write.

    Args:
        loss_log, evaluation_log: the files.
        take_snapshot: gets each snapshot once the lines before it are on disk, so that a run which is resumed from it
            has them.
        leave_out: told, on the program's thread, of the step of a snapshot that comes while one waits for its lines.
        begun: the digests of what the files hold already; of one that is left out the file is read.

    Attributes:
        last_step: of the last loss that was written, None before the first.
        num_evaluations: written.
    """

    def __init__(
        self,
        loss_log: Path,
        evaluation_log: Path,
        take_snapshot: Callable[[PushedSnapshot], None] | None = None,
        leave_out: Callable[[int], None] = lambda _: None,
        begun: Mapping[Path, RunningDigest] | None = None,
    ) -> None:
        self._losses, self._evaluations = (
            JsonLines(path, (begun or {}).get(path)) for path in (loss_log, evaluation_log)
        )
        self._names = loss_log.name, evaluation_log.name
        self._take_snapshot, self._leave_out = take_snapshot, leave_out
        self._is_evaluated = False
        self.last_step: int | None = None
        self.num_evaluations = 0

    def open(self) -> None:
        """Opens the loss log."""
        self._losses.open()

    def write(self, record: LossRecord) -> None:
        """Appends a loss."""
        self._losses.append(record.to_json())
        self.last_step = record.step

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Appends an evaluation."""
        if not self._is_evaluated:
            self._losses.check_place()  # no new file in a folder that is another run's by now
            self._evaluations.open()
            self._is_evaluated = True
        self._evaluations.append(record.to_json())
        self.num_evaluations += 1

    def write_snapshot(self, snapshot: PushedSnapshot) -> None:
        """Brings what was written to the disk and passes the snapshot on."""
        if self._take_snapshot is not None:
            self.sync()
            self._take_snapshot(snapshot)

    def leave_out(self, snapshot: PushedSnapshot) -> None:
        """Tells of a snapshot that will not be written."""
        self._leave_out(snapshot.step)

    def sync(self) -> None:
        """Brings what was written to the disk."""
        self._losses.sync()
        self._evaluations.sync()

    def states(self) -> dict[str, LogState]:
        """Return how far each file has come, by its name; of one that was not begun, the state of no bytes."""
        return dict(zip(self._names, (self._losses.state(), self._evaluations.state()), strict=True))

    def close(self) -> None:
        """Closes both files, their lines on the disk; raises LostFileError where they are no longer in their places."""
        try:
            self.sync()
        finally:
            self._losses.close()
            self._evaluations.close()
