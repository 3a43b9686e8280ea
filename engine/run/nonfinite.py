"""The error of a run whose gradients or updated weights were NaN or infinite at too many consecutive steps."""


class NonFiniteError(ArithmeticError):
    """Raised if the gradients of a run, or the weights that they would make, were not finite too often in a row.

    Attributes:
        first_step: the first of these consecutive steps.
    """

    def __init__(self, message: str, first_step: int) -> None:
        super().__init__(message)
        self.first_step = first_step


def nonfinite_error(
    step: int, num_skips: int, most_skips: int, *, has_user_part: bool = False
) -> NonFiniteError | None:
    """Return an error if NaN or infinite gradients or weights ended the run, else None.

    Args:
        step: the last step.
        num_skips: number of updates skipped in a row, up to and including the last.
        most_skips: largest allowed number of updates skipped in a row.
        has_user_part: whether a user-defined optimizer or schedule may have made the updates NaN or infinite.
    """
    if num_skips <= most_skips:
        return None
    message = (
        f"the gradient, or a weight that it would make, was NaN or infinite at step {step}"
        + (f", the last of {num_skips} such steps in a row" if num_skips > 1 else "")
        + "; the weights are those of the last finite update. Try a lower learning rate (--learning-rate), a warm-up "
        "(--warmup-steps), a limit on the norm of the gradient (--clip-norm), or --skip-nonfinite"
    )
    if has_user_part:
        message = message.replace("that it would make", "that your optimizer or schedule would make of it", 1)
    return NonFiniteError(message, first_step=step - num_skips + 1)
