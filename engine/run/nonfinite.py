"""The error of a run whose gradients were NaN or infinite at too many consecutive steps."""


class NonFiniteError(ArithmeticError):
    """A run's gradients were NaN or infinite at more consecutive steps than allowed.

    Attributes:
        first_step: the first of these consecutive steps.
    """

    def __init__(self, message: str, first_step: int) -> None:
        super().__init__(message)
        self.first_step = first_step


def nonfinite_error(step: int, num_skips: int, most_skips: int) -> NonFiniteError | None:
    """Return the error of a run that left its loop because of NaN or infinite gradients, None if it did not.

    Args:
        step: the last step.
        num_skips: how many updates in a row were skipped up to it.
        most_skips: how many the run may skip.
    """
    if num_skips <= most_skips:
        return None
    return NonFiniteError(
        f"the gradient was NaN or infinite at step {step}"
        + (f" and the {num_skips - 1} before it" if num_skips > 1 else "")
        + ", and the weights are those of the last finite update: try a lower learning rate, a warm-up or a limit "
        "on the gradient's norm (--learning-rate, --warmup-steps, --clip-norm), or --skip-nonfinite",
        first_step=step - num_skips + 1,
    )
