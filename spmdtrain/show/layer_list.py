"""Describes the layers of a model: mixers, windows, rotary positions, mlps, experts."""

from collections.abc import Sequence
from typing import Any

from spmdtrain.config.schema import LayerKind, TransformerConfig
from spmdtrain.config.schema.model.layer_kinds import singles_of


def layer_rows(model: TransformerConfig) -> list[dict[str, Any]]:
    """Returns the kinds of layers, in order of appearance, each with the numbers of its layers.

    `window`: tokens that attention sees, 0 for all. `chunk`: those of a block that it does not
    leave, 0 for none. `rope_theta`: None without rotary positions.
    """
    kinds = [
        (_without_attention(kind) if "attention" not in singles_of(parts.mixer) else kind, parts)
        for kind, parts in zip(model.layer_kinds, model.layer_parts, strict=True)
    ]
    return [
        {
            "layers": [number for number, one in enumerate(kinds) if one == (kind, parts)],
            **kind._asdict(),
            **parts._asdict(),
        }
        for kind, parts in dict.fromkeys(kinds)
    ]


def _without_attention(kind: LayerKind) -> LayerKind:
    """Returns the kind of a layer that reads nothing of it."""
    return kind._replace(window=0, rope_theta=None, is_scaled=False, chunk=0)


def describe_layers(model: TransformerConfig) -> str:
    """Returns a line for each kind of layer, or "" if all layers are alike and see all tokens.

    Whether a layer has experts is said by `describe_experts`.
    """
    rows = layer_rows(model)
    lines: dict[str, list[int]] = {}
    for row in rows:
        lines.setdefault(_line(row, model), []).extend(row["layers"])
    is_plain = rows[0]["mixer"] == "attention" and not rows[0]["window"] and not rows[0]["chunk"]
    if len(lines) == 1 and is_plain and rows[0]["mlp"] != "none":
        return ""
    return "\n".join(f"layers {_ranges(sorted(layers))} {line}" for line, layers in lines.items())


def experts_row(model: TransformerConfig) -> dict[str, Any] | None:
    """Returns the numbers of the layers with experts, and their sizes; None if there are none."""
    if model.experts is None:
        return None
    return {
        "layers": [number for number, mlp in enumerate(model.layer_mlps) if mlp == "experts"],
        "count": model.experts.count,
        "chosen": model.experts.chosen,
        "shared": model.experts.shared,
        "shared_ffn": model.experts.shared_width,
        "shared_gate": model.experts.shared_gate,
        "own_norms": model.experts.own_norms,
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
        shared += ", both with norms of their own" if row["own_norms"] else ""
    return (
        f"layers {_ranges(row['layers'])} have {row['count']} experts of width {row['ffn']}, "
        f"{row['chosen']} for a token{shared}"
    )


def _line(row: dict[str, Any], model: TransformerConfig) -> str:
    """Returns what a layer of a row does, after its numbers."""
    span = f"the last {row['window']:,} tokens" if row["window"] else "all tokens"
    if row["chunk"]:
        span = f"the tokens of their block of {row['chunk']:,}"
    parts = {
        "attention": [f"see {span}"],
        "both": [f"see {span} beside ssd"],
        "none": ["mix no tokens"],
    }.get(row["mixer"], [f"mix tokens by {row['mixer']}"])
    if row["mlp"] == "none":
        parts.append("no mlp")
    if "attention" not in singles_of(row["mixer"]):
        return ", ".join(parts)
    if model.positions == "rope":
        theta = row["rope_theta"]
        parts.append("no rotary positions" if theta is None else f"theta {theta:,.10g}")
    if model.full and not row["window"]:
        parts.append(_heads(model))
    if row["shares_keys"]:
        parts.append("keys and values of an earlier layer")
    if row["is_scaled"] and model.rope_scaling is not None:
        parts.append(f"{model.rope_scaling.kind} x {model.rope_scaling.factor:g}")
    return ", ".join(parts)


def _heads(model: TransformerConfig) -> str:
    """Returns a description of the heads that [model.full] has of its own."""
    full = model.of_layer(model.layer_parts[model.full_layers[0]])
    keys = "keys, which are values" if model.full and model.full.keys_are_values else "keys"
    return f"heads of {full.head_dim}, {full.kv_heads} of {keys}"


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as "0-4, 6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
