"""A failing draw made small: settings are set back to their defaults as long as it fails in the
same way.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.draw import Draw, after, settings_of
from fuzz.settings import BASE, Values, overrides, text_of

PARTS = ("change", "onto", "layout", "numbers")


def shrunk(draw: Draw, fails: Callable[[Draw], bool], seconds: float) -> Draw:
    """The smallest draw found within `seconds` that still `fails`: greedily, until nothing can
    be left out.
    """
    until = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for smaller in simpler(draw):
            if time.monotonic() > until:
                return draw
            if fails(smaller):
                draw, again = smaller, True
                break
    return draw


def simpler(draw: Draw) -> Iterator[Draw]:
    """What is tried, most first: another end, whole parts, halves of parts, one setting at a
    time.
    """
    if draw.end != "whole":
        yield replace(draw, end="whole", onto={}, change={})
    if draw.end in ("moved", "changed"):
        yield replace(draw, end="whole", layout=draw.onto, onto={}, change={})
    if draw.end == "changed":
        yield replace(draw, end="moved", change={})
    if draw.end == "moved":
        yield replace(draw, end="same", onto={})
    for part in PARTS:
        values = getattr(draw, part)
        for fewer in _fewer(values):
            yield replace(draw, **{part: fewer})
    if draw.by == "kill" and draw.end != "whole":
        yield replace(draw, by="term")
    if draw.stop > 1:
        yield replace(draw, stop=1)


def _fewer(values: Values) -> Iterator[Values]:
    """Without all, without a half, without each; a mesh axis with fewer devices."""
    keys = list(values)
    half = len(keys) // 2
    dropped = [keys, keys[:half], keys[half:], *([key] for key in keys)]
    for some in dropped if len(keys) > 3 else dropped[:1] + dropped[3:]:
        if some:
            yield {key: value for key, value in values.items() if key not in some}
    for key, value in values.items():
        if key.startswith("mesh.") and value > 2:
            yield values | {key: 2}
        if isinstance(value, tuple) and len(value) > 1:
            yield from (values | {key: tuple(x for x in value if x != left)} for left in value)


def _said_already(text: str, values: Values) -> bool:
    """By base.toml, whose words on a section count where its class stays."""
    key, _, value = text.partition("=")
    section = key.partition(".")[0]
    renamed = values.get(f"{section}.name", "") not in ("", "gpt", "adamw")
    return not renamed and key in BASE and text_of(key, BASE[key]) == value


def spoken(draw: Draw) -> str:
    """The draw as a person would type it."""

    def line(numbers: Values, layout: Values) -> str:
        values, devices = settings_of(numbers, layout)
        sets = " ".join(
            f"--set {text}" for text in overrides(values) if not _said_already(text, values)
        )
        simulate = f"--simulate-devices {devices}"
        return f"spmdtrain train tests/fuzz/base.toml --run RUN {simulate} {sets}".rstrip()

    lines = [line(draw.numbers, draw.layout)]
    if draw.end != "whole":
        lines[0] += f"    # stopped at step {draw.stop} ({draw.by})"
        layout = draw.layout if draw.end == "same" else draw.onto
        lines.append(line(after(draw.numbers, draw.change), layout))
    return "\n".join(lines)
