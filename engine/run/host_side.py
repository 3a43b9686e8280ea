"""The host side of a launch: the transport, control requests, notices and stop signals."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Self

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.choice import choose_chunk, choose_transport, this_platform
from loopfeed.engine.crossing.devices import Team, choose_team
from loopfeed.engine.crossing.transport import Transport
from loopfeed.engine.run.signals import StopSignals
from loopfeed.engine.runtime.compilations import recording_compilations
from loopfeed.engine.settings import SettingError
from loopfeed.engine.spans import Spans
from loopfeed.engine.stream.notices import Notices

ELSEWHERE = "cuda"
"""The platform of devices that are not here: programs are compiled only for NVIDIA GPUs."""


class Placement(NamedTuple):
    """Devices that are not here, for which a program is only compiled, and their transport.

    Attributes:
        team: the devices, and those of them that one host drives.
        transport: the way in which the program calls the host.
    """

    team: Team
    transport: Transport


class HostSide:
    """A context manager for the host-side parts of a launch; it is entered before the data are opened.

    Inside the context, the stop signals are handled (`loopfeed.engine.run.signals.StopSignals`).

    Args:
        config: the settings.
        notify: called with a line of text.
        board: the board of requests to the program; None creates a new board.
        placement: the devices of a program that is only compiled; None chooses those of this machine.

    Attributes:
        board: the board of requests to the program.
        notices: messages to the user during the run.
        team: the devices that train together.
        transport: the way in which the program calls the host.
        chunk: batches per pull.
        is_elsewhere: whether the devices are not here.
        platform: the platform of the devices, such as "cpu".
        signals: the handler of the signals that stop the launch.
        spans: what the launch, which begins here, spends its time on.

    Raises:
        ValueError: the requested transport is not available on this machine.
    """

    def __init__(
        self,
        config: TrainConfig,
        notify: Callable[[str], None],
        board: ControlBoard | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.spans = Spans()
        self.board, self.notices = board or ControlBoard(), Notices(notify)
        self.is_elsewhere = placement is not None
        self.platform = ELSEWHERE if self.is_elsewhere else this_platform()
        if placement is not None:
            self.team, self.transport = placement
        else:
            self.team = choose_team(config)
            self.transport = choose_transport(config.transport, self.platform, len(self.team.devices))
        self.chunk = choose_chunk(config.chunk_batches, self.transport)
        is_chosen = config.chunk_batches is not None or not self.is_elsewhere
        if self.chunk > 1 and is_chosen and len(self.team.own) < len(self.team.devices):
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
        self._stack.enter_context(recording_compilations(self.spans))
        self._stack.callback(self.notices.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
