"""Draws schedules: as text with a column per tick, and as an SVG drawn to scale."""

from colorsys import hls_to_rgb
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

from spmdtrain.pipeline.check import LETTERS
from spmdtrain.pipeline.phases import phases
from spmdtrain.pipeline.schedule import WORK, Table, units_of
from spmdtrain.pipeline.timing import (
    Idle,
    Span,
    Times,
    lockstep_idle,
    lockstep_spans,
    lockstep_ticks,
    megatron_orders,
    order_idle,
    zb_h1_orders,
)

if TYPE_CHECKING:  # it imports jax, which `spmdtrain schedule` does not need
    from spmdtrain.pipeline.stage_layout import StageLayout

TERMINAL_COLOURS = {"forward": 34, "backward": 32, "weight": 33}  # ANSI: blue, green, yellow
HUES = {"forward": 0.58, "backward": 0.38, "weight": 0.09}  # of the SVG, in turns
NAMES = {"forward": "forward", "backward": "backward", "weight": "weight gradient"}

# The SVG's measures in pixels.
ROW = 26  # height of a stage
GAP = 6  # between stages
LEFT = 74  # margins
TOP = 74
NARROWEST = 16.0  # width of the shortest box: its number must fit
LEAST_WIDTH = 900.0
GREY = "#444444"
LIGHT_GREY = "#888888"
IDLE = "#eeeeee"


def headline(table: Table, times: Times | None = None) -> str:
    """Describes a schedule in one line: its sizes, its bubble and its largest stash."""
    sizes = f"{table.stages} stages"
    if table.chunks > 1:
        sizes += f", {table.chunks} chunks"
    bubble = lockstep_idle(table, times).bubble
    return (
        f"{table.kind}: {sizes}, {table.microbatches} microbatches, {table.ticks} ticks, "
        f"bubble {bubble:.1%}, stash {max(table.peak_stash)}"
    )


def describe_pipeline(table: Table, layout: "StageLayout", of_round: int = 1) -> str:
    """Describes a schedule in one line, with the cost of padding and a cure for a large bubble.

    `of_round`: the layers of a round, which stages do not divide.
    """
    parts = [headline(table)]
    if layout.padding:
        more = layout.places / layout.layers - 1
        shared_out = f"rounds of {of_round} layers" if of_round > 1 else "layers"
        padded = f"{layout.layers} {shared_out} in {layout.places} places"
        parts.append(f"{padded}, {more:.0%} more layer work")
    if table.microbatches < table.stages:
        parts.append("a smaller train.microbatch makes more of them, and the bubble smaller")
    return "; ".join(parts)


def bubbles(table: Table, times: Times, *, peers: bool) -> str:
    """Describes the bubble and the cost of hops in one line, with the times assumed.

    `peers`: adds the bubble of other frameworks that run this kind of schedule in their own order.
    """
    shares = [f"{_shares(lockstep_idle(table, times), times)} in lockstep"]
    if peers and table.kind in ("1f1b", "interleaved"):
        orders = megatron_orders(table.stages, table.microbatches, table.chunks)
        shares.append(f"{_shares(order_idle(orders, times), times)} in Megatron-LM's order")
    elif peers and table.kind == "zero_bubble" and table.chunks == 1:
        orders = zb_h1_orders(table.stages, table.microbatches)
        shares.append(f"{_shares(order_idle(orders, times), times)} in ZB-H1's order")
    prices = [f"{LETTERS[kind]} {getattr(times, kind):g}" for kind in WORK]
    prices.append(f"hop {times.hop:g}")
    return f"bubble {', '.join(shares)} ({', '.join(prices)})"


def _shares(idle: Idle, times: Times) -> str:
    hops = f" and hops {idle.hops:.1%}" if times.hop else ""
    return f"{idle.bubble:.1%}{hops}"


def draw(
    table: Table, times: Times | None = None, *, width: int | None = None, colour: bool = False
) -> str:
    """Draws a schedule as text: a row per stage and kind of work, a column per tick.

    A cell holds the microbatch and, if there are several chunks, a letter for the chunk. Ticks that
    do not fit into `width` characters continue below. `colour` uses ANSI escapes.
    """
    labels = {}
    for kind in WORK:
        if (units_of(table, kind)[..., 0] >= 0).any():
            labels[kind] = _labels(table, kind)
    longest = max(len(label) for rows in labels.values() for row in rows for label in row)
    column = 1 + max(longest, len(str(table.ticks - 1)))
    margin = len(f"stage {table.stages - 1} F")
    fitting = table.ticks
    if width is not None:
        fitting = max(1, (width - margin) // column)

    lines = [headline(table, times)]
    for start in range(0, table.ticks, fitting):
        ticks = range(start, min(start + fitting, table.ticks))
        header = "".join(str(tick).rjust(column) for tick in ticks)
        lines += ["", "tick".ljust(margin) + header]
        for stage in range(table.stages):
            name = f"stage {stage}"
            for kind, rows in labels.items():
                cells = "".join(rows[tick][stage].rjust(column) for tick in ticks).rstrip()
                if colour and cells:
                    cells = f"\x1b[{TERMINAL_COLOURS[kind]}m{cells}\x1b[0m"
                lines.append(f"{name.ljust(margin - 1)}{LETTERS[kind]}{cells}")
                name = ""  # once, before the first kind of work
    return "\n".join(lines)


def svg(table: Table, times: Times | None = None) -> str:
    """Draws a schedule as a self-contained SVG, with stages in lockstep.

    Each stage has a row, and in it each unit has a box, as wide as the unit's time, with its
    microbatch.
    """
    times = times or Times()
    spans = lockstep_spans(table, times)
    ticks = lockstep_ticks(table, times)
    total = float(ticks.sum())
    lengths = [span.stop - span.start for span in spans]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    scale = max(NARROWEST / shortest, LEAST_WIDTH / total)  # pixels per unit of time
    bottom = _top(table.stages)
    width = f"{LEFT + total * scale + 20:.0f}"
    height = bottom + 34

    title = escape(headline(table, times))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" fill="#222222">{title}</text>',
        *_legend(table),
    ]
    for stage in range(table.stages):
        top = _top(stage)
        label = f'x="{LEFT - 10}" y="{top + 17}" text-anchor="end" fill="{GREY}"'
        row = f'x="{LEFT}" y="{top}" width="{total * scale:.1f}" height="{ROW}" fill="{IDLE}"'
        parts.append(f"<text {label}>stage {stage}</text>")
        parts.append(f"<rect {row}/>")
    parts += [_box(span, table.chunks, scale) for span in spans]
    edges = LEFT + np.concatenate([[0.0], ticks.cumsum()]) * scale
    parts += _phase_marks(table, edges.tolist(), bottom)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _labels(table: Table, kind: str) -> list[list[str]]:
    """Returns the texts of the cells of a kind of work, [ticks][stages]."""
    return [
        [_label(microbatch, chunk, table.chunks) for microbatch, chunk in row]
        for row in units_of(table, kind).tolist()
    ]


def _label(microbatch: int, chunk: int, chunks: int) -> str:
    if microbatch < 0:
        return "·"
    if chunks == 1:
        return str(microbatch)
    if chunks > 26:
        return f"{microbatch}.{chunk}"
    return f"{microbatch}{chr(ord('a') + chunk)}"


def _top(stage: int) -> int:
    return TOP + stage * (ROW + GAP)


def _box(span: Span, chunks: int, scale: float) -> str:
    x = LEFT + span.start * scale
    width = (span.stop - span.start) * scale
    top = _top(span.stage)
    fill, ink = _colours(span.kind, span.chunk, chunks)
    box = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{fill}"'
    text = f'x="{x + width / 2:.1f}" y="{top + 17}" text-anchor="middle" fill="{ink}"'
    return f'<rect {box} stroke="#ffffff"/><text {text}>{span.microbatch}</text>'


def _colours(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Returns (fill of a box, ink in it): a hue per kind of work, lighter with each chunk."""
    lightness = 0.42 + 0.40 * chunk / max(1, chunks - 1)
    red, green, blue = (round(255 * part) for part in hls_to_rgb(HUES[kind], lightness, 0.55))
    ink = "#ffffff" if lightness < 0.6 else "#222222"
    return f"#{red:02x}{green:02x}{blue:02x}", ink


def _legend(table: Table) -> list[str]:
    parts = []
    left = LEFT

    def square(fill: str) -> str:
        return f'<rect x="{left}" y="38" width="14" height="14" fill="{fill}"/>'

    def text(words: str, offset: int = 0) -> str:
        return f'<text x="{left + offset}" y="49" fill="{GREY}">{words}</text>'

    for kind in WORK:
        if kind == "weight" and not table.split:
            continue
        for chunk in range(table.chunks):
            fill, _ = _colours(kind, chunk, table.chunks)
            parts.append(square(fill))
            left += 14
        left += 6
        name = NAMES[kind]
        if kind == "backward" and not table.split:
            name = "backward (both gradients)"
        parts.append(text(name))
        left += 20 + 6 * len(name)
    parts.append(square(IDLE))
    parts.append(text("idle", 20))
    if table.chunks > 1:
        parts.append(text("lighter: later chunk", 70))
    return parts


def _phase_marks(table: Table, edges: list[float], bottom: int) -> list[str]:
    """Draws a line where the kinds of work change, and names them below if there is room.

    `edges`: where each tick starts, and where the last one ends, in pixels.
    """
    parts = []
    for phase in phases(table):
        left = edges[phase.start]
        right = edges[phase.stop]
        kinds = "+".join(LETTERS[kind] for kind in WORK if getattr(phase, kind))
        if phase.start:
            line = f'x1="{left:.1f}" x2="{left:.1f}" y1="{TOP - 8}" y2="{bottom}"'
            parts.append(f'<line {line} stroke="{LIGHT_GREY}" stroke-dasharray="3 3"/>')
        if right - left > 8 * len(kinds):
            middle = (left + right) / 2
            text = f'x="{middle:.1f}" y="{bottom + 14}" text-anchor="middle" fill="{LIGHT_GREY}"'
            parts.append(f"<text {text}>{kinds}</text>")
    return parts
