"""LFM2 and LFM2-MoE: short convolutions, and attention in some layers."""

from typing import Any

from spmdtrain.config.published.families.expert_keys import (
    BY_SIGMOID,
    after_first,
    experts_of,
    first_dense_of,
    read_experts,
    write_experts,
)
from spmdtrain.config.published.families.family import SIZES, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.families.listed_kinds import listed_kinds
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import FULL
from spmdtrain.config.schema import TransformerConfig

CONV = "conv"  # the kind of a layer, and its mixer here
MIXERS = {CONV: "conv", FULL: "attention"}
TIES, WIDTH = "tie_embedding", "block_ff_dim"  # which count before the usual keys
NUMBERS = "full_attn_idxs"  # of the layers with attention
THETA = 1e6
SUM_EPSILON = 1e-6  # of the gates, of which no key says anything
# Keys of the published files that say a size again.
OF_EMBED = ("block_dim", "conv_dim", "conv_dim_out")


def _lfm2(keys: Keys) -> ModelSettings:
    kinds = _listed(keys) or _kinds_by_number(keys)
    return _common(keys, kinds) | {"ffn": _adjusted_width(keys)}


def _common(keys: Keys, kinds: list[str]) -> ModelSettings:
    """Returns the settings of mixers and of the head, which the two families share."""
    _check_repeated(keys)
    mixers = [MIXERS[kind] for kind in kinds]
    conv = {"taps": keys.count("conv_L_cache"), "bias": keys.flag("conv_bias")}
    settings: ModelSettings = {}
    if keys.take(TIES) is not None:
        settings["tied"] = keys.flag(TIES)
    if "conv" in mixers:
        settings |= {"mixers": shortest(mixers), "conv": conv}
    return settings


def _check_repeated(keys: Keys) -> None:
    """Refuses keys of published files that contradict the others."""
    for name in OF_EMBED:
        keys.agrees(name, keys.count("hidden_size"))
    keys.agrees("num_heads", keys.count("num_attention_heads"))
    keys.agrees("block_norm_eps", keys.positive("norm_eps"))
    keys.agrees("block_use_swiglu", True)
    keys.agrees("use_pos_enc", True)
    rope = dict(keys.table("rope_parameters") or {})
    keys.agrees("theta", rope.get("rope_theta", keys.positive("rope_theta")))


def _listed(keys: Keys) -> list[str] | None:
    """Returns `layer_types`, which the numbers of the layers with attention may repeat."""
    kinds = listed_kinds(keys, MIXERS)
    if kinds is not None:
        keys.agrees(NUMBERS, _numbers(kinds))
    return kinds


def _kinds_by_number(keys: Keys) -> list[str]:
    """Returns the kinds by the numbers of the layers with attention; without those all have it."""
    layers = range(keys.count("num_hidden_layers"))
    numbers = keys.take(NUMBERS)
    if numbers is None:
        return [FULL] * len(layers)
    if not isinstance(numbers, list) or not all(number in layers for number in numbers):
        raise keys.refused(NUMBERS, numbers, f"numbers of {len(layers)} layers, from 0 on")
    return [FULL if number in numbers else CONV for number in layers]


def _numbers(kinds: list[str]) -> list[int]:
    return [number for number, kind in enumerate(kinds) if kind == FULL]


def _adjusted_width(keys: Keys) -> int:
    """Returns the width of mlps, which the class computes from the one that the file says."""
    width = keys.some(WIDTH) or keys.count("intermediate_size")
    factor = keys.positive("block_ffn_dim_multiplier")
    multiple = keys.count("block_multiple_of")
    if not keys.flag("block_auto_adjust_ff_dim"):
        return width
    adjusted = int(2 * width / 3)
    if factor is not None:
        adjusted = -(-int(factor * adjusted) // multiple) * multiple
    if adjusted < 1:
        raise keys.refused("intermediate_size", width, "2 or more, of which it takes two thirds")
    return adjusted


def _write_lfm2(model: TransformerConfig) -> dict[str, Any]:
    keys = _write_common(model)
    return keys | {
        NUMBERS: _numbers(keys["layer_types"]),
        WIDTH: model.ffn,
        "block_dim": model.embed,
        "block_auto_adjust_ff_dim": False,
    }


def _write_common(model: TransformerConfig) -> dict[str, Any]:
    theirs = {ours: kind for kind, ours in MIXERS.items()}
    kinds = [theirs.get(mixer) for mixer in model.layer_mixers]
    keys: dict[str, Any] = {TIES: model.tied, "layer_types": kinds}
    if model.conv:
        keys |= {"conv_L_cache": model.conv.taps, "conv_bias": model.conv.bias}
    return keys


def _lfm2_moe(keys: Keys) -> ModelSettings:
    experts = read_experts(keys, "num_experts") | BY_SIGMOID
    experts |= {
        "ffn": keys.count("moe_intermediate_size"),
        "normalise": keys.flag("norm_topk_prob"),
        "scale": float(keys.positive("routed_scaling_factor") or 1),
        "sum_epsilon": SUM_EPSILON,
    }
    if not keys.flag("use_expert_bias"):
        del experts["bias_rate"]
    kinds = _listed(keys) or [FULL] * keys.count("num_hidden_layers")
    return _common(keys, kinds) | after_first(keys, experts, "num_dense_layers")


def _write_lfm2_moe(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        **_write_common(model),
        **write_experts(experts, "num_experts"),
        "moe_intermediate_size": experts.ffn,
        "num_dense_layers": first_dense_of(model),
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
        "use_expert_bias": experts.bias_rate is not None,
    }


READS = (*SIZES, "norm_eps", "tie_word_embeddings", TIES, "layer_types", "conv_L_cache")
READS += ("conv_bias",)
DEFAULTS = {
    "norm_eps": 1e-5,
    "rope_theta": THETA,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
LFM = {
    "lfm2": Family(
        "Lfm2ForCausalLM",
        reads=(
            *READS,
            NUMBERS,
            WIDTH,
            "block_auto_adjust_ff_dim",
            "block_ffn_dim_multiplier",
            "block_multiple_of",
        ),
        defaults={
            **DEFAULTS,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        settings={"query_norm": "head"},
        read=_lfm2,
        write=_write_lfm2,
        epsilon="norm_eps",
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        reads=(
            *READS,
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_dense_layers",
            "num_experts",
            "num_experts_per_tok",
            "routed_scaling_factor",
            "use_expert_bias",
        ),
        defaults={
            **DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "use_expert_bias": True,
        },
        settings={"query_norm": "head"},
        read=_lfm2_moe,
        write=_write_lfm2_moe,
        epsilon="norm_eps",
    ),
}
