"""The parts from which the training program of a launch is made, for looks at a batch or a step outside of it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from loopfeed.engine.crossing.infeed import BatchInfeed
from loopfeed.engine.crossing.transport import Transport
from loopfeed.engine.program.statics import Statics
from loopfeed.engine.program.train_state import RunValues, TrainModel


class LaunchParts(NamedTuple):
    """The parts from which a training program is made.

    Attributes:
        model, statics, infeed, transport: of the program.
        devices: all devices, those of other processes included.
        values: the runtime settings.
    """

    model: TrainModel
    statics: Statics
    infeed: BatchInfeed
    transport: Transport
    devices: Sequence[jax.Device]
    values: RunValues
