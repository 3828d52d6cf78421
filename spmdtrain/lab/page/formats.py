"""Formats numbers for people, and makes texts safe for a page."""

import html
import math
from typing import Any

SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
LONGEST = 300  # characters of a text from a file
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def safe(text: Any) -> str:
    """Returns a text from a file, escaped for HTML and of bounded length."""
    shown = str(text)
    if len(shown) > LONGEST:
        shown = shown[: LONGEST - 1] + "…"
    shown = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown
    )
    return html.escape(shown)


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with a few digits, or a dash if it is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    for least, name in COUNTS:
        if size >= least:
            return f"{value / (1e3 if name == 'k' else least):.{digits}g} {name}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}" if size < 1000 else f"{value:,.0f}"


def size(count: float | None) -> str:
    """Returns a number of bytes with a unit."""
    if count is None or not math.isfinite(count):
        return "–"
    for least, name in SIZES:
        if abs(count) >= least:
            return f"{count / least:.3g} {name}"
    return f"{count:.0f} B"


def seconds(value: float | None) -> str:
    """Returns a duration with a unit."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 2 * MINUTE:
        return f"{value:.3g} s"
    if value < 2 * HOUR:
        return f"{int(value // MINUTE)} min {int(value % MINUTE)} s"
    return f"{value / HOUR:.1f} h" if value < 2 * DAY else f"{value / DAY:.1f} days"


def share(part: float, whole: float) -> str:
    """Returns a share in percent, or a dash if the whole is 0."""
    return f"{part / whole:.0%}" if whole > 0 else "–"


def plural(count: int, word: str) -> str:
    """Returns a count with its word, such as "3 steps"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
