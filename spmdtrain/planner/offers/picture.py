"""Plans as a picture: `spmdtrain plan --svg FILE`. A row is a plan, the best one on top.

On the left a bar is as long as its step, its days or its cost; on the right is the memory of the
fullest device by category, and a line where it would be full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from spmdtrain.parallel.mesh import mesh_in_words
from spmdtrain.planner.estimate import Estimate
from spmdtrain.planner.offers.offer_tables import layout_of
from spmdtrain.planner.offers.offers import Offer
from spmdtrain.planner.plan import Plan

# Lengths in pixels.
LABEL = 250
BAR = 260
GAP = 90
ROW = 26
HEAD = 58
FILLS = ("#4c78a8", "#72b7b2", "#f58518", "#e45756", "#b279a2", "#54a24b", "#9d755d", "#bab0ac")
RANK_FILL = "#cfdff2"


@dataclass(frozen=True)
class RankedPlan:
    """A plan in the picture: its value in the ranking, as number and as text, and its estimate."""

    label: str
    value: float
    value_text: str
    estimate: Estimate


def rows_of_plans(plans: Sequence[Plan]) -> list[RankedPlan]:
    """Returns the rows of layouts on the same devices, ranked by the time of a step."""
    return [
        RankedPlan(
            mesh_in_words(plan.workload.mesh.sizes),
            plan.seconds,
            f"{plan.seconds:.4g} s",
            plan.estimate,
        )
        for plan in plans
    ]


def rows_of_offers(offers: Sequence[Offer]) -> list[RankedPlan]:
    """Returns the rows of offers that fit, ranked by cost where it is known, else by days."""
    fitting = [offer for offer in offers if offer.best is not None]
    by_cost = all(offer.cost is not None for offer in fitting)
    rows = []
    for offer in fitting:
        assert offer.best is not None, "it fits"
        value = offer.cost if by_cost and offer.cost is not None else offer.days
        value_text = f"{value:,.0f}" if by_cost else f"{value:.4g} days"
        label = f"{offer.devices} x {offer.hardware.name}: {layout_of(offer)}"
        rows.append(RankedPlan(label, value, value_text, offer.best.estimate))
    return rows


def picture(title: str, rows: Sequence[RankedPlan]) -> str:
    """Returns the picture of plans as an SVG."""
    largest = max((row.value for row in rows), default=1.0) or 1.0
    room = max((row.estimate.hardware.memory for row in rows), default=1.0)
    held = max((row.estimate.memory.total for row in rows), default=1.0)
    scale = BAR / max(room, held)
    categories = list(dict.fromkeys(name for row in rows for name in _held(row.estimate)))
    width = LABEL + BAR + GAP + BAR + GAP
    height = HEAD + ROW * len(rows) + 40
    parts = [
        _text(8, 20, title, "bold"),
        _text(LABEL + BAR + GAP, 20, "memory of a device", "bold"),
    ]
    for number, row in enumerate(rows):
        y = HEAD + ROW * number
        parts += [
            _text(8, y + 14, row.label),
            _bar(LABEL, y, BAR * row.value / largest, RANK_FILL, row.value_text),
            _text(LABEL + BAR * row.value / largest + 5, y + 14, row.value_text),
            *_memory(row.estimate, categories, scale, y),
        ]
    parts += _legend(categories, HEAD - 24)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _held(estimate: Estimate) -> dict[str, float]:
    """Returns the bytes on a device by category, which add up to its memory."""
    sizes = estimate.memory.by_category()
    return {name: float(size) for name, size in sizes.items() if name != "total"}


def _memory(estimate: Estimate, categories: Sequence[str], scale: float, y: float) -> list[str]:
    """Returns the memory of one plan: a bar by category, its total, and where a device is full."""
    start = at = LABEL + BAR + GAP
    parts = []
    sizes = _held(estimate)
    for number, name in enumerate(categories):
        long = scale * sizes.get(name, 0.0)
        tooltip = f"{name.replace('_', ' ')}: {sizes.get(name, 0.0) / 1e9:.3g} GB"
        parts.append(_bar(at, y, long, FILLS[number % len(FILLS)], tooltip))
        at += long
    full = start + scale * estimate.hardware.memory
    parts.append(f'<line x1="{full:.1f}" x2="{full:.1f}" y1="{y}" y2="{y + 20}" stroke="#222222"/>')
    end = max(at, full) + 5
    return [*parts, _text(end, y + 14, f"{estimate.memory.total / 1e9:.1f} GB")]


def _legend(categories: Sequence[str], y: float) -> list[str]:
    parts = []
    x = 8.0
    for number, name in enumerate(categories):
        words = name.replace("_", " ")
        parts += [
            _bar(x, y, 10, FILLS[number % len(FILLS)], words, 10),
            _text(x + 14, y + 9, words),
        ]
        x += 26 + 6.2 * len(words)
    return parts


def _bar(x: float, y: float, long: float, fill: str, tooltip: str, high: int = 20) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{long:.1f}" height="{high}" fill="{fill}">'
        f"<title>{escape(tooltip)}</title></rect>"
    )


def _text(x: float, y: float, words: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(words)}</text>'
