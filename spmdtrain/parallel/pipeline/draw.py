"""Schedules drawn: in the terminal, a cell a tick, and as an SVG in the time that they take."""

from colorsys import hls_to_rgb
from xml.sax.saxutils import escape

import numpy as np

from spmdtrain.parallel.pipeline.check import LETTERS
from spmdtrain.parallel.pipeline.phases import phases
from spmdtrain.parallel.pipeline.schedule import WORK, Table, units_of
from spmdtrain.parallel.pipeline.timing import (
    Times,
    bubble_fraction,
    lockstep_spans,
    lockstep_ticks,
    megatron_orders,
    order_bubble_fraction,
    zb_h1_orders,
)

TERMINAL_COLOURS = {"forward": 34, "backward": 32, "weight": 33}
HUES = {"forward": 0.58, "backward": 0.38, "weight": 0.09}
NAMES = {"forward": "forward", "backward": "backward", "weight": "weight gradient"}

ROW, GAP, LEFT, TOP = 26, 6, 74, 74
NARROWEST, LEAST_WIDTH = 16.0, 900.0


def headline(table: Table, times: Times | None = None) -> str:
    """The schedule in one line."""
    sizes = [f"{table.stages} stages"] + [f"{table.chunks} chunks"] * (table.chunks > 1)
    bubble = bubble_fraction(table, times)
    return (
        f"{table.kind}: {', '.join(sizes)}, {table.microbatches} microbatches, {table.ticks} ticks, "
        f"bubble {bubble:.1%}, stash {max(table.peak_stash)}"
    )


def bubbles(table: Table, times: Times, *, peers: bool) -> str:
    """The bubble in one line; `peers`: that of the order in which others run a schedule of this kind as well."""
    found = [f"{bubble_fraction(table, times):.1%} in lockstep"]
    if peers and table.kind in ("1f1b", "interleaved"):
        orders = megatron_orders(table.stages, table.microbatches, table.chunks)
        found.append(f"{order_bubble_fraction(orders, times):.1%} in Megatron-LM's order")
    elif peers and table.kind == "zero_bubble" and table.chunks == 1:
        orders = zb_h1_orders(table.stages, table.microbatches)
        found.append(f"{order_bubble_fraction(orders, times):.1%} in ZB-H1's order")
    priced = ", ".join(f"{LETTERS.get(name, name)} {getattr(times, name):g}" for name in (*WORK, "hop"))
    return f"bubble {', '.join(found)} ({priced})"


def draw(table: Table, times: Times | None = None, *, width: int | None = None, colour: bool = False) -> str:
    """A row per stage and kind of work, a column per tick with the microbatch, and the chunk as a letter if several.

    Ticks that do not fit into `width` characters go on below.
    """
    labels = {kind: _labels(table, kind) for kind in WORK if (units_of(table, kind)[..., 0] >= 0).any()}
    column = 1 + max(
        len(str(table.ticks - 1)), *(len(label) for rows in labels.values() for row in rows for label in row)
    )
    margin = len(f"stage {table.stages - 1} F")
    fitting = table.ticks if width is None else max(1, (width - margin) // column)
    lines = [headline(table, times)]
    for start in range(0, table.ticks, fitting):
        block = range(start, min(start + fitting, table.ticks))
        lines += ["", "tick".ljust(margin) + "".join(str(tick).rjust(column) for tick in block)]
        for stage in range(table.stages):
            for kind, rows in labels.items():
                name = f"stage {stage}" if kind == next(iter(labels)) else ""
                cells = "".join(rows[tick][stage].rjust(column) for tick in block).rstrip()
                if colour and cells:
                    cells = f"\x1b[{TERMINAL_COLOURS[kind]}m{cells}\x1b[0m"
                lines.append(f"{name.ljust(margin - 1)}{LETTERS[kind]}{cells}")
    return "\n".join(lines)


def svg(table: Table, times: Times | None = None) -> str:
    """A self-contained picture: a row per stage, a box per unit as wide as it takes, with its microbatch."""
    times = times or Times()
    spans, ticks = lockstep_spans(table, times), lockstep_ticks(table, times)
    total = float(ticks.sum())
    shortest = min((span.stop - span.start for span in spans if span.stop > span.start), default=1.0)
    scale = max(NARROWEST / shortest, LEAST_WIDTH / total)
    bottom = TOP + table.stages * (ROW + GAP)
    width, height = LEFT + total * scale + 20, bottom + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" fill="#222222">{escape(headline(table, times))}</text>',
        *_legend(table),
    ]
    for stage in range(table.stages):
        top = TOP + stage * (ROW + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{top + 17}" text-anchor="end" fill="#444444">stage {stage}</text>')
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{total * scale:.1f}" height="{ROW}" fill="#eeeeee"/>')
    for span in spans:
        left, wide, top = LEFT + span.start * scale, (span.stop - span.start) * scale, TOP + span.stage * (ROW + GAP)
        box, ink = _colours(span.kind, span.chunk, table.chunks)
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{ROW}" fill="{box}" stroke="#ffffff"/>'
            f'<text x="{left + wide / 2:.1f}" y="{top + 17}" text-anchor="middle" fill="{ink}">{span.microbatch}</text>'
        )
    edges = LEFT + np.concatenate([[0.0], ticks.cumsum()]) * scale
    return "\n".join([*parts, *_phase_marks(table, edges.tolist(), bottom), "</svg>"]) + "\n"


def _labels(table: Table, kind: str) -> list[list[str]]:
    return [
        ["·" if microbatch < 0 else f"{microbatch}{_chunk_label(chunk, table.chunks)}" for microbatch, chunk in row]
        for row in units_of(table, kind).tolist()
    ]


def _chunk_label(chunk: int, chunks: int) -> str:
    if chunks == 1:
        return ""
    return chr(ord("a") + chunk) if chunks <= 26 else f".{chunk}"


def _colours(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Of the box and of the ink in it: a hue per kind, lighter with each chunk."""
    lightness = 0.42 + 0.40 * chunk / max(1, chunks - 1)
    red, green, blue = (round(255 * part) for part in hls_to_rgb(HUES[kind], lightness, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if lightness < 0.6 else "#222222"


def _legend(table: Table) -> list[str]:
    parts, left = [], LEFT
    for kind in WORK:
        if kind == "weight" and not table.split:
            continue
        for chunk in range(table.chunks):
            box, _ = _colours(kind, chunk, table.chunks)
            parts.append(f'<rect x="{left}" y="38" width="14" height="14" fill="{box}"/>')
            left += 14 if chunk < table.chunks - 1 else 20
        name = NAMES[kind] if table.split or kind != "backward" else "backward (both gradients)"
        parts.append(f'<text x="{left}" y="49" fill="#444444">{name}</text>')
        left += 20 + 6 * len(name)
    parts.append(f'<rect x="{left}" y="38" width="14" height="14" fill="#eeeeee"/>')
    parts.append(f'<text x="{left + 20}" y="49" fill="#444444">idle</text>')
    if table.chunks > 1:
        parts.append(f'<text x="{left + 70}" y="49" fill="#444444">lighter: later chunk</text>')
    return parts


def _phase_marks(table: Table, edges: list[float], bottom: int) -> list[str]:
    """A line where the kinds of work change, and below each stretch which they are, if there is room."""
    parts = []
    for phase in phases(table):
        left, right = edges[phase.start], edges[phase.stop]
        kinds = "+".join(LETTERS[kind] for kind in WORK if getattr(phase, kind))
        if phase.start:
            line = f'x1="{left:.1f}" x2="{left:.1f}" y1="{TOP - 8}" y2="{bottom}"'
            parts.append(f'<line {line} stroke="#888888" stroke-dasharray="3 3"/>')
        if right - left > 8 * len(kinds):
            middle = (left + right) / 2
            parts.append(f'<text x="{middle:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#888888">{kinds}</text>')
    return parts
