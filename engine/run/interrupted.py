"""What a signal that stopped a run means to somebody who types: the next cell must not run as if all was done."""

import signal
import threading
from collections.abc import Callable

from loopfeed.engine.python_calls import is_interactive
from loopfeed.engine.run.result import TrainResult

_SIGNALS = frozenset(each.name for each in signal.Signals)


class RunInterrupted(KeyboardInterrupt):
    """Raised in a notebook or at a prompt if a signal stopped a run, after its weights and last snapshot were written.

    Attributes:
        result: the result of the run so far.
    """

    def __init__(self, message: str, result: TrainResult) -> None:
        super().__init__(message)
        self.result = result


def train_interruptibly(train: Callable[[], TrainResult]) -> TrainResult:
    """Return the result of a run, or raise RunInterrupted if a signal stopped it and somebody types in this session.

    Raises:
        KeyboardInterrupt: a second signal ended it at once, or one came before the first step.
        BaseException: whatever the run raised.
    """
    if threading.current_thread() is not threading.main_thread() or not is_interactive():
        return train()
    try:
        result = train()
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:
            interrupt.args = ("training was stopped at once, without a last snapshot",)
        raise
    if result.stopped_by not in _SIGNALS:
        return result
    at = f"training was stopped by {result.stopped_by} after step {result.steps_done:,}"
    if result.run_dir is None:
        kept = "nothing of it is on the disk, because it has no folder (run_dir); `result` of this exception has it all"
        raise RunInterrupted(f"{at}; {kept}", result)
    where = "its weights" if result.snapshot_step is None else "its weights and a snapshot"
    raise RunInterrupted(
        f"{at}; {where} are in {result.run_dir}. To go on, train with resume=True; to begin again, with overwrite=True "
        "(for example train(replace(config, resume=True), …))",
        result,
    )
