"""Round numbers for the axes of charts."""

import math


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Return up to `most` + 1 multiples of 1, 2 or 5 · 10^k from `low` to `high`, or both bounds if none exist."""
    span = high - low
    if not 0 < span < math.inf:
        return [low] if low == high else [low, high]
    exponent = math.floor(math.log10(span / most)) if span / most > 0 else -300
    for factor, power in ((1, 0), (2, 0), (5, 0), (1, 1), (2, 1)):
        between = float(f"{factor}e{exponent + power}")
        if between > 0 and span / between <= most * (1 + 1e-9):
            # Multiples are counted from the first, because k · between for a huge k is not exact.
            first = math.ceil(low / between)
            values = [(first + k) * between for k in range(math.floor(span / between * (1 + 1e-9)) + 1)]
            values = [float(f"{value:.12g}") for value in values]
            values = [value for value in values if low <= value <= high]
            return values or [low, high]
    return [low, high]
