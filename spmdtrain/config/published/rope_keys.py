"""Converts the rotary positions of a config.json, in the keys of transformers 4 and 5.

transformers 4 writes `rope_theta` and `rope_scaling`. transformers 5 writes one table
`rope_parameters`, or one for each kind of layer, which transformers 4 silently ignores. Both are
read here, the table first, and both are written.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.families.family import Family
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

PROPORTIONAL = "proportional"
FULL, WINDOW = "full_attention", "sliding_attention"
SHARE, WINDOW_THETA = "partial_rotary_factor", "rope_local_base_freq"
ORIGINAL = "original_max_position_embeddings"
Table = Mapping[str, Any]
ANOTHER = "a model with linear, llama3, yarn or longrope"


def read_rope(keys: Keys, name: str, family: Family) -> dict[str, Any]:
    """Returns the settings of [model] for rotary positions, as the class of the family `name` reads
    them.
    """
    _check_share(name, family, keys.values.get(SHARE), keys.where)
    keys.pass_over(SHARE)
    theta = keys.positive("rope_theta", 10_000.0)
    window_theta = keys.positive(WINDOW_THETA, theta)
    old = keys.table("rope_scaling")
    share = keys.positive(SHARE)
    length = keys.whole("max_position_embeddings")
    original = keys.some(ORIGINAL)
    full = {"rope_theta": theta, SHARE: share} | dict(old or {})
    window: dict[str, Any] = {"rope_theta": window_theta}
    if new := keys.table("rope_parameters"):
        tables = Keys(new, {}, f"{keys.where}: rope_parameters")
        if FULL in new or family.rope_in_tables:
            window |= tables.table(WINDOW) or {}
            new = tables.table(FULL) or {}
        elif old is not None:
            _check_agree(keys, full, new)
        full = full | dict(new)
    if original is not None:
        full.setdefault(ORIGINAL, original)
    inner = Keys(full, {}, f"{keys.where}: rope")
    settings: dict[str, Any] = {"rope_theta": float(inner.positive("rope_theta") or 10_000.0)}
    if family.rope_by_kind:
        of_window = Keys(window, {}, f"{keys.where}: rope")
        settings["rope_theta_window"] = float(of_window.positive("rope_theta") or 10_000.0)
        reads_own = family.rope_in_tables or WINDOW_THETA in family.reads
        has_own = reads_own or window["rope_theta"] == full["rope_theta"]
        if _kind(window) != "default" or not has_own:
            raise keys.unknown("rope_parameters", {WINDOW: window})
    kind = _kind(full)
    share = None
    if SHARE not in family.rope_keys and kind != PROPORTIONAL:
        share = inner.positive(SHARE)
    _check_share(name, family, share, keys.where)
    if share not in (None, 1):
        settings["rope_share"] = float(share)
    is_chosen = family.rope_kinds or kind == PROPORTIONAL  # other classes turn all pairs
    if is_chosen and kind not in ("default", *family.rope_kinds):
        raise keys.unknown("rope_type", kind)
    if scaling := _read_scaling(inner, kind, length):
        settings["rope_scaling"] = scaling
    if family.rope_by_kind and scaling and not scaling.get("truncate", True):
        # transformers 5 looks for it beside the tables of the kinds of layers, not in them.
        raise keys.refused("truncate", False, f"true, as transformers' class of {name} takes it")
    inner.pass_over(*family.rope_keys)
    inner.check_all_taken()
    return settings


def _check_agree(keys: Keys, older: Table, newer: Table) -> None:
    """Raises ConfigError if the two forms differ: transformers 5 takes the older one alone, with
    the theta and the share of its class where these are not beside it.
    """
    older, newer = (dict(table) | {"rope_type": _kind(table)} for table in (older, newer))
    usual = {"rope_theta": 10_000.0, SHARE: 1.0}
    for name in ("rope_type", "rope_theta", SHARE, "factor"):
        value, counting = newer.get(name), older.get(name) or usual.get(name)
        if None not in (value, counting) and value != counting:
            wanted = f"of {name}={value!r:.40}, as rope_parameters say"
            raise keys.refused("rope_scaling", older, wanted)


def _check_share(name: str, family: Family, share: Any, where: str) -> None:
    """Raises ConfigError if a file rotates only a share of a head's channels, but the class of its
    family rotates all: transformers 5 then ignores the key, and transformers 4 stops.
    """
    reads_share = SHARE in family.reads and PROPORTIONAL not in family.rope_kinds
    if share in (None, 1) or reads_share:
        return
    raise ConfigError(
        f"{where}: {SHARE}={share!r:.40}, but transformers' class of {name} turns all channels",
        fix=f"{SHARE}=1, if the model was trained so",
    )


def _kind(table: Table) -> str:
    kind = table.get("rope_type", table.get("type"))
    if kind is None:
        return "default"
    return "longrope" if kind == "su" else str(kind)


def _read_scaling(keys: Keys, kind: str, length: int | None) -> dict[str, Any] | None:
    """Returns [model.rope_scaling], or None if positions are not scaled."""
    keys.take("rope_type")
    keys.take("type")
    original = keys.some(ORIGINAL)
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn", "longrope", PROPORTIONAL):
        why = "depends on the length of each sequence" if kind == "dynamic" else "is not known here"
        where = keys.where.removesuffix(": rope")
        raise ConfigError(f"{where}: rope_type {kind!r} {why}", fix=ANOTHER)
    factor = keys.positive("factor", 1.0 if kind == PROPORTIONAL else None)
    if factor is None and length and original:
        factor = length / original
    if factor is None:
        raise ConfigError(f"{keys.where} of type {kind!r} lacks factor", fix=ANOTHER)
    scaling: dict[str, Any] = {"kind": kind, "factor": float(factor)}
    if kind == "linear":
        return scaling
    if kind == PROPORTIONAL:
        return scaling | {"share": float(keys.positive(SHARE, 1.0) or 1)}
    scaling["original_length"] = original or length
    scale = keys.positive("attention_factor")
    if kind == "llama3":
        scaling["low_factor"] = float(keys.positive("low_freq_factor", 1.0) or 1)
        scaling["high_factor"] = float(keys.positive("high_freq_factor", 4.0) or 4)
    if kind == "yarn":  # transformers takes a 0 of these for absent, too
        scaling["beta_fast"] = float(keys.number("beta_fast") or 32)
        scaling["beta_slow"] = float(keys.number("beta_slow") or 1)
        scaling["truncate"] = keys.flag("truncate", True)
        both = keys.number("mscale"), keys.number("mscale_all_dim")
        if scale is None and both[0] and both[1]:
            scale = yarn_scale(factor, both[0]) / yarn_scale(factor, both[1])
    if kind == "longrope":
        scaling |= _read_longrope(keys)
    if scale is not None:
        scaling["scale"] = float(scale)
    return scaling


def _read_longrope(keys: Keys) -> dict[str, Any]:
    """Returns the divisors of the frequencies; the length of the run chooses between them."""
    keys.take("short_mscale")
    keys.take("long_mscale")
    divisors = {}
    for ours, theirs in (("short", "short_factor"), ("long", "long_factor")):
        values = keys.take(theirs)
        if not isinstance(values, list) or not all(isinstance(x, int | float) for x in values):
            raise keys.refused(theirs, values, "a list of numbers")
        divisors[ours] = [float(x) for x in values]
    return divisors


def yarn_scale(factor: float, times: float) -> float:
    """Returns yarn's multiplier for this factor, with its logarithm weighted by `times`."""
    return 0.1 * times * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(
    model: TransformerConfig,
    *,
    strictly: Sequence[str] = (),
    by_kind: bool = False,
    in_tables: bool = False,
) -> dict[str, Any]:
    """Returns the keys in both forms.

    `strictly`, `by_kind` and `in_tables` are the `strict_scaling`, `rope_by_kind` and
    `rope_in_tables` of a family.
    """
    scaling = old = _write_scaling(model)
    if scaling and strictly:
        old, scaling = _only_accepted(scaling, strictly)
    share = {} if model.rope_share == 1 else {SHARE: model.rope_share}
    full = {"rope_theta": model.rope_theta, **share, **(scaling or {"rope_type": "default"})}
    keys = {"rope_theta": model.rope_theta, "rope_scaling": old, **share}
    if scaling and scaling["rope_type"] == "longrope":  # where transformers 4 looks for it
        keys[ORIGINAL] = scaling[ORIGINAL]
    if not by_kind:
        return keys | {"rope_parameters": full}
    theta = model.rope_theta_window or model.rope_theta
    window = {"rope_theta": theta, "rope_type": "default"}
    keys = {} if in_tables else keys | {WINDOW_THETA: theta}
    return keys | {"rope_parameters": {FULL: full, WINDOW: window}}


def _only_accepted(
    scaling: dict[str, Any], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a scaling as transformers 4 and 5 write it, for a family whose class in version 4
    accepts only these keys: the rest must follow from the lengths.
    """
    accepted = {key: scaling[key] for key in names if key in scaling}
    kind = scaling["rope_type"]
    old = {"type": kind, **accepted}
    length = {ORIGINAL: scaling[ORIGINAL]} if ORIGINAL in scaling else {}
    return old, {"rope_type": kind, **accepted, **length}


def _write_scaling(model: TransformerConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    keys: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return keys
    if scaling.kind == PROPORTIONAL:
        return keys | {SHARE: scaling.share}
    keys[ORIGINAL] = scaling.original_length
    if scaling.kind == "llama3":
        keys |= {"low_freq_factor": scaling.low_factor, "high_freq_factor": scaling.high_factor}
    if scaling.kind == "yarn":
        keys |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        keys |= {} if scaling.truncate else {"truncate": False}
    if scaling.kind == "longrope":
        keys |= {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
        # transformers 4 would compute it from the ratio of the lengths, in place of the factor.
        keys["attention_factor"] = scaling.amplitude
    if scaling.scale is not None:
        keys["attention_factor"] = scaling.scale
    return keys
