"""The host side of a launch: the transport, control requests, notices and stop signals."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from engine.config import TrainConfig
from engine.control.board import ControlBoard
from engine.crossing.choice import choose_chunk, choose_transport, this_platform
from engine.crossing.devices import choose_team
from engine.run.signals import StopSignals
from engine.settings import SettingError
from engine.stream.notices import Notices


class HostSide:
    """A context manager for the host-side parts of a launch; it is entered before the data are opened.

    Inside the context, SIGINT and SIGTERM are handled (`engine.run.signals.StopSignals`).

    Args:
        config: the settings.
        notify: called with a line of text.
        board: the board of requests to the program; None creates a new board.

    Attributes:
        board: the board of requests to the program.
        notices: messages to the user during the run.
        team: the devices that train together.
        transport: the way in which the program calls the host.
        chunk: batches per pull.
        signals: the handler of the signals that stop the launch.

    Raises:
        ValueError: the requested transport is not available on this machine.
    """

    def __init__(self, config: TrainConfig, notify: Callable[[str], None], board: ControlBoard | None = None) -> None:
        self.board, self.notices = board or ControlBoard(), Notices(notify)
        self.team = choose_team(config)
        self.transport = choose_transport(config.transport, this_platform(), len(self.team.devices))
        self.chunk = choose_chunk(config.chunk_batches, self.transport)
        if self.chunk > 1 and len(self.team.own) < len(self.team.devices):
            raise SettingError(
                "chunk_batches",
                "several processes pull one batch at a time, got {setting} {found}: leave it out",
                found=self.chunk,
            )
        where = "after the current chunk of steps" if self.chunk > 1 else "at the next step"
        self.signals = StopSignals(self.board, self.notices.say, where)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.signals)
        self._stack.callback(self.notices.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
