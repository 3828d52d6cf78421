"""Describes the layers of a model: windows, rotary positions, experts."""

from collections.abc import Sequence
from typing import Any

from spmdtrain.config.schema import TransformerConfig


def layer_rows(model: TransformerConfig) -> list[dict[str, Any]]:
    """Returns the kinds of layers, in order of appearance, each with the numbers of its layers.

    `window`: tokens that attention sees, 0 for all. `rope_theta`: None without rotary positions.
    """
    kinds = model.layer_kinds
    return [
        {"layers": [number for number, one in enumerate(kinds) if one == kind], **kind._asdict()}
        for kind in dict.fromkeys(kinds)
    ]


def describe_layers(model: TransformerConfig) -> str:
    """Returns a line for each kind of layer, or "" if all layers are alike and see all tokens."""
    rows = layer_rows(model)
    if len(rows) == 1 and not rows[0]["window"]:
        return ""
    return "\n".join(_line(row, model) for row in rows)


def experts_row(model: TransformerConfig) -> dict[str, Any] | None:
    """Returns the numbers of the layers with experts, and their sizes; None if there are none."""
    if model.experts is None:
        return None
    return {
        "layers": [number for number, has in enumerate(model.has_experts) if has],
        "count": model.experts.count,
        "chosen": model.experts.chosen,
        "shared": model.experts.shared,
        "shared_ffn": model.experts.shared_width,
        "shared_gate": model.experts.shared_gate,
        "ffn": model.experts.ffn,
    }


def describe_experts(model: TransformerConfig) -> str:
    """Returns a line about the experts of a model, or "" if it has none."""
    row = experts_row(model)
    if row is None:
        return ""
    shared = ""
    if row["shared"]:
        shared = f", {row['shared']} more for all tokens"
        if row["shared_ffn"] != row["shared"] * row["ffn"]:
            shared += f" of width {row['shared_ffn']:,}"
        shared += " with a gate" if row["shared_gate"] else ""
    return (
        f"layers {_ranges(row['layers'])} have {row['count']} experts of width {row['ffn']}, "
        f"{row['chosen']} for a token{shared}"
    )


def _line(row: dict[str, Any], model: TransformerConfig) -> str:
    span = f"the last {row['window']:,} tokens" if row["window"] else "all tokens"
    parts = [f"layers {_ranges(row['layers'])} see {span}"]
    if model.positions == "rope":
        theta = row["rope_theta"]
        parts.append("no rotary positions" if theta is None else f"theta {theta:,.10g}")
    if row["is_scaled"] and model.rope_scaling is not None:
        parts.append(f"{model.rope_scaling.kind} x {model.rope_scaling.factor:g}")
    return ", ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as "0-4, 6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
