"""Renders several offers of `spmdtrain plan`: a table for people, values for programs."""

from collections.abc import Sequence
from typing import Any

from spmdtrain.parallel.mesh import mesh_in_words
from spmdtrain.planner.offers.offers import Offer
from spmdtrain.planner.report import estimate_values

COLUMNS = ("hardware", "GPUs", "step", "days", "cost", "cost a G tokens", "mfu", "memory", "layout")


def offers_values(offers: Sequence[Offer]) -> list[dict[str, Any]]:
    """Returns a JSON object of each offer: that of `estimate`, with tokens, days and cost."""
    return [_values(offer) for offer in offers]


def _values(offer: Offer) -> dict[str, Any]:
    if offer.best is None:
        return {
            "hardware": offer.hardware.name,
            "devices": offer.devices,
            "fits": False,
            "problem": offer.refusal,
        }
    mean, worst = offer.error
    return estimate_values(offer.best.estimate) | {
        "tokens": offer.tokens,
        "steps": offer.steps,
        "days": offer.days,
        "price_per_gpu_hour": offer.price,
        "cost": offer.cost,
        "mean_error": mean,
        "worst_error": worst,
        "settings": offer.best.settings,
    }


def offers_text(offers: Sequence[Offer]) -> str:
    """Renders a table, best first, with its possible error and the line to paste."""
    fitting = [offer for offer in offers if offer.best is not None]
    rows = [COLUMNS, *map(_cells, fitting)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    refused = [
        f"{offer.devices} x {offer.hardware.name}: {offer.refusal}"
        for offer in offers
        if offer.best is None
    ]
    if not fitting:
        return "\n".join(refused)
    best = fitting[0]
    assert best.best is not None, "it fits"
    mean, worst = best.error
    lines += [
        "",
        f"to {best.tokens:.4g} tokens, with what saves and failures lose, without waiting for "
        "machines",
        f"steps of published runs were off by up to {mean:.0%} on average and {worst:.0%} at "
        f"worst: {_between(best, worst)}",
        *refused,
        "",
        f"{best.devices} x {best.hardware.name}: "
        + " ".join(f"--set {setting}" for setting in best.best.settings),
    ]
    return "\n".join(lines)


def _between(offer: Offer, error: float) -> str:
    """Returns the range of days, and of costs, of the best offer at this error."""
    low, high = 1 / (1 + error), 1 / (1 - error)
    text = f"the first takes {low * offer.days:.3g} to {high * offer.days:.3g} days"
    if offer.cost is not None:
        text += f" and costs {low * offer.cost:,.0f} to {high * offer.cost:,.0f}"
    return text


def layout_of(offer: Offer) -> str:
    """Returns the axes of the best layout that are split, such as "fsdp 8 x tensor 2"."""
    assert offer.best is not None, "an offer on which the model fits"
    return mesh_in_words(offer.best.workload.mesh.sizes)


def _cells(offer: Offer) -> tuple[str, ...]:
    assert offer.best is not None, "an offer on which the model fits"
    cost = "-" if offer.cost is None else f"{offer.cost:,.0f}"
    cost_of_tokens = "-" if offer.cost is None else f"{1e9 * offer.cost / offer.tokens:.4g}"
    return (
        offer.hardware.name,
        str(offer.devices),
        f"{offer.best.seconds:.4g} s",
        f"{offer.days:.4g}",
        cost,
        cost_of_tokens,
        f"{offer.best.estimate.time.mfu:.1%}",
        f"{offer.best.memory.total / 1e9:.1f} GB",
        layout_of(offer),
    )
