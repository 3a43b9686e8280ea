"""Numbers as the page writes them."""

import math
import time

from loopfeed.preprocess.quantities import duration_text

_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, a dash for NaN."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        text = f"{value:,.{max(0, digits - 1 - _exponent(value))}f}"
        return text.replace("-", "−")
    return f"{value:.{digits - 1}e}".replace("-", "−")


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


def short(value: float, between: float = 0.0) -> str:
    """Return a round number as the label of an axis: 1500000 as 1.5M.

    Args:
        value: the number.
        between: the distance to the next label, from which this one must differ; 0 for four digits.
    """
    digits = 4 if not between or not value else max(4, _exponent(value) - _exponent(between) + 2)
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{suffix}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def whole(value: float) -> str:
    """Return a number without decimals, a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:,.0f}".replace("-", "−")


def percent(fraction: float, decimals: int = 2) -> str:
    """Return a fraction in percent, a dash for NaN."""
    return "–" if math.isnan(fraction) else f"{100 * fraction:.{decimals}f} %"


def duration(seconds: float) -> str:
    """Return a duration in at most two units, a dash for NaN."""
    return duration_text(seconds) if seconds >= 60 else brief(seconds)


def brief(seconds: float) -> str:
    """Return a duration with three digits in s, ms or µs, a dash for NaN."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= size:
            return f"{number(seconds / size, 3)} {unit}"
    return "–" if math.isnan(seconds) else "0 s" if not seconds else f"{seconds * 1e6:.2g} µs"


def moment(seconds: float) -> str:
    """Return a Unix time as date and time (UTC), a dash for NaN or a time out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "–"
