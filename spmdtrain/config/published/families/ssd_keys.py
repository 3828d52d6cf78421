"""Reads and writes the keys of Mamba-2 that several families share."""

from collections.abc import Mapping
from typing import Any

from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import SsdConfig

LIMIT = "time_step_limit"
INFINITY = float("inf")
NO_LIMIT = (0.0, INFINITY)
# Ours and theirs, in the files of Granite 4 and Falcon-H1.
SIZES = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "taps": "mamba_d_conv",
}
READS = (*SIZES.values(), "mamba_conv_bias", "mamba_expand", "mamba_proj_bias", LIMIT)
DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    LIMIT: (0.0, None),
}


def without_infinity(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys with null in place of an infinite time, which JSON has no number for.

    transformers 5 writes {"__float__": "Infinity"}, and others Infinity itself.
    """
    limit = values.get(LIMIT)
    if not isinstance(limit, list):
        return dict(values)
    return dict(values) | {LIMIT: [None if _is_infinite(bound) else bound for bound in limit]}


def _is_infinite(bound: Any) -> bool:
    return bound in (INFINITY, {"__float__": "Infinity"})


def read_limit(keys: Keys) -> dict[str, Any]:
    """Returns the bounds of a token's time, of `time_step_limit`."""
    limit = keys.take(LIMIT, (0.0, None))
    if limit is None:
        return {}
    is_pair = isinstance(limit, list | tuple) and len(limit) == 2
    numbers = [bound for bound in limit if bound is not None] if is_pair else [-1]
    if not all(type(bound) in (int, float) and bound >= 0 for bound in numbers):
        raise keys.refused(LIMIT, limit, "two numbers, of which the second may be infinite")
    bounds: dict[str, Any] = {"smallest_step": float(limit[0] or 0)}
    return bounds | ({} if limit[1] is None else {"largest_step": float(limit[1])})


def write_limit(ssd: SsdConfig) -> dict[str, Any]:
    """Returns `time_step_limit`, in the spelling of published files."""
    return {LIMIT: [ssd.smallest_step, ssd.largest_step or INFINITY]}


def read_ssd(keys: Keys, inner: int | None = None) -> ModelSettings:
    """Returns [model.ssd], in the keys of Granite 4 and Falcon-H1.

    `inner`: the width of all heads, by which `mamba_d_head` may be left out; default:
    `mamba_expand` times that of the stream.
    """
    keys.must_be("mamba_proj_bias", False, None)
    expanded = keys.count("mamba_expand") * keys.count("hidden_size")
    inner = inner or expanded
    heads = keys.count("mamba_n_heads")
    if keys.take("mamba_d_head") in ("auto", None):
        head_dim = inner // heads
    else:
        head_dim = keys.count("mamba_d_head")
    if heads * head_dim != inner:
        raise keys.refused("mamba_n_heads", heads, f"a divisor of the width {inner} of all heads")
    sizes = {ours: keys.count(SIZES[ours]) for ours in ("groups", "state", "taps")}
    biases = {"taps_bias": keys.flag("mamba_conv_bias")}
    return {"heads": heads, "head_dim": head_dim} | sizes | biases | read_limit(keys)


def write_ssd(ssd: SsdConfig) -> dict[str, Any]:
    """Returns the keys that `read_ssd` reads, but for the width of all heads."""
    sizes = {theirs: getattr(ssd, ours) for ours, theirs in SIZES.items()}
    return sizes | {"mamba_conv_bias": ssd.taps_bias, "mamba_proj_bias": False} | write_limit(ssd)
