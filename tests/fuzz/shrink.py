"""A failing draw made small: settings are set back to their defaults as long as it fails in the
same way.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.draw import Draw, after, settings_of
from fuzz.settings import BASE, Values, overrides, text_of

PARTS = ("numbers", "change", "layout", "onto")


def shrunk(draw: Draw, fails: Callable[[Draw], bool], seconds: float) -> Draw:
    """The smallest draw found within `seconds` that still `fails`: greedily, until nothing can be
    left out.
    """
    until = time.monotonic() + seconds
    tried: set[str] = set()

    def still(other: Draw) -> bool:
        key = repr(other)
        if key in tried or time.monotonic() > until:
            return False
        tried.add(key)
        return fails(other)

    before = None
    while draw != before:
        before = draw
        draw = next(filter(still, _shorter(draw)), draw)
        for part in PARTS:
            draw = _fewer(draw, part, still)
        for part in ("layout", "onto"):
            draw = next(filter(still, _lesser(draw, part)), draw)
    return draw


def _shorter(draw: Draw) -> Iterator[Draw]:
    """With less of what happens to the run."""
    if draw.end != "whole":
        yield replace(draw, end="whole", onto={}, change={})
    if draw.end in ("moved", "changed", "begun"):
        yield replace(draw, end="whole", layout=draw.onto, onto={}, change={})
        yield replace(draw, end="same", onto={}, change={})
    if draw.end == "changed":
        yield replace(draw, end="moved", change={})
    if draw.by == "kill" and draw.end != "whole":
        yield replace(draw, by="term")
    if draw.stop > 1:
        yield replace(draw, stop=1)


def _fewer(draw: Draw, part: str, still: Callable[[Draw], bool]) -> Draw:
    """Without all settings of a part, without each half, quarter and so on, without each."""
    size = len(getattr(draw, part))
    while size:
        keys = list(getattr(draw, part))
        for start in range(0, len(keys), size):
            dropped = keys[start : start + size]
            left = {key: x for key, x in getattr(draw, part).items() if key not in dropped}
            other = replace(draw, **{part: left})
            draw = other if still(other) else draw
        size //= 2
    return draw


def _lesser(draw: Draw, part: str) -> Iterator[Draw]:
    """An axis with fewer devices, a rule with fewer axes."""
    values = getattr(draw, part)
    for key, value in values.items():
        if key.startswith("mesh.") and value > 2:
            yield replace(draw, **{part: values | {key: 2}})
        if isinstance(value, tuple | list) and len(value) > 1:
            for left in value:
                yield replace(draw, **{part: values | {key: tuple(x for x in value if x != left)}})


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
        numbers = after(draw.numbers, draw.change)
        if draw.end == "begun":
            numbers |= {"train.init_from": "RUN"}
        lines.append(line(numbers, layout))
        if draw.end == "begun":
            lines[1] = lines[1].replace("--run RUN", "--run NEW")
    return "\n".join(lines)
