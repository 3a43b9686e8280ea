"""A profile: the rows of its two tables, and what they were measured from.

Phases, actions and columns are those of fastxtend's Simple Profiler (https://fastxtend.benjaminwarner.dev). Does not
depend on how they are measured or printed.
"""

from dataclasses import dataclass

FIT = "fit"
"""The phase of the whole launch."""

UNATTRIBUTED = "unattributed"
"""The action of time that belongs to no other action."""

FIT_ACTIONS = ("fit", "epoch", "train", "valid")
STEP, BATCH = "step", "batch"
"""The actions, beside those of `loopfeed.engine.scopes`, that contain others: a step is `draw` and `batch`."""

STEP_OF_SEVERAL = "micro-step"
"""The action in place of "step" where the gradients of several batches are accumulated: one of these batches."""


@dataclass(frozen=True)
class ProfileRow:
    """How long one action took.

    Attributes:
        phase: "fit", "train" or "valid".
        action: the action: "fit", "epoch", "train" and "valid" in the first phase; in the others "step" (in
            training "micro-step", if gradients are accumulated), "draw", "batch", the actions of
            `loopfeed.engine.scopes.ACTIONS`, and "unattributed".
        mean_s, std_s: mean and standard deviation of its duration in seconds; the deviation is None if the program
            draws several batches at once, so that only their sum is known.
        calls: number of times that it took place in this launch.
        samples_per_s: images divided by its duration; of "draw", the images per second that waiting costs, as a
            negative number; None if it processes no images.
        total_s: total duration in seconds.
        percent: its share of the time of the fit, in percent.
        is_estimated: whether the time was measured in the traced steps only, and stands for all.
    """

    phase: str
    action: str
    mean_s: float
    std_s: float | None
    calls: int
    samples_per_s: float | None
    total_s: float
    percent: float
    is_estimated: bool = False


@dataclass(frozen=True)
class ScopeRow:
    """How long the operations of one scope took, such as a stage of the model in the forward pass.

    Attributes:
        scope: the scope inside the action, such as "layer1"; empty for operations of the action without one.
        phase, action, mean_s, std_s, calls, samples_per_s, total_s, percent: as in `ProfileRow`; estimated from the
            traced steps.
    """

    phase: str
    action: str
    scope: str
    mean_s: float
    std_s: float | None
    calls: int
    samples_per_s: float | None
    total_s: float
    percent: float


@dataclass(frozen=True)
class TracedSteps:
    """The steps of one phase whose operations were traced.

    Attributes:
        phase: "train" or "valid".
        first: number of the first traced batch of the launch, from 0.
        count: number of traced batches.
        mean_s: mean duration of a traced batch, its draw included, in seconds, by the clock of the trace.
        attributed_s: the part of `mean_s` that belongs to an action.
    """

    phase: str
    first: int
    count: int
    mean_s: float
    attributed_s: float


@dataclass(frozen=True)
class Profile:
    """How long each phase and action of one launch took.

    Attributes:
        rows: the table of phases and actions. In each of the phases "train" and "valid", "step" (or "micro-step") is
            "draw" and "batch", and the rows after "batch" except "snapshot" add up to "batch".
        scopes: the table of the scopes inside the actions.
        traced: the traced steps of each phase; empty if nothing was traced.
        notes: what to know about the rows, one sentence each.
    """

    rows: tuple[ProfileRow, ...]
    scopes: tuple[ScopeRow, ...] = ()
    traced: tuple[TracedSteps, ...] = ()
    notes: tuple[str, ...] = ()

    def row(self, phase: str, action: str) -> ProfileRow | None:
        """Return the row of an action, None if there is none."""
        return next((row for row in self.rows if (row.phase, row.action) == (phase, action)), None)
