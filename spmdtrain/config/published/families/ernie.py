"""ERNIE 4.5, dense and with experts."""

from itertools import pairwise
from typing import Any

from spmdtrain.config.published.families.expert_keys import are_sparse, experts_of, in_layers
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

BIASES = ("qkv_bias", "out_bias", "mlp_bias")
# The layers with experts.
START, END, INTERVAL = PATTERN = (
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
)
USUAL = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}


def _ernie4_5(keys: Keys) -> ModelSettings:
    return dict.fromkeys(BIASES, True) if keys.flag("use_bias") else {}


def _write_ernie4_5(model: TransformerConfig) -> dict[str, Any]:
    return {"use_bias": model.qkv_bias}


def _ernie4_5_moe(keys: Keys) -> ModelSettings:
    renamed = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    count, chosen = (
        keys.count(other if other in keys else name) for other, name in renamed.items()
    )
    experts = {
        "count": count,
        "chosen": chosen,
        "ffn": keys.count("moe_intermediate_size"),
        "shared": keys.whole("moe_num_shared_experts") or 0,
        "smallest_sum": float(keys.positive("moe_norm_min") or 1e-12),
        "bias_rate": 0.0,
    }
    if keys.flag("use_bias"):  # experts have none, but the other mlps would
        raise keys.unknown("use_bias", True)
    return in_layers(experts, _sparse(keys))


def _sparse(keys: Keys) -> list[bool]:
    """Returns whether each layer has experts: each so many-th from a first to a last one."""
    layers, first = keys.count("num_hidden_layers"), keys.whole(START) or 0
    last, interval = keys.number(END), keys.count(INTERVAL)
    if last in (None, -1):
        last = layers
    return [first <= number <= last and not (number + 1) % interval for number in range(layers)]


def _write_sparse(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that `_sparse` reads, with the shortest interval between two layers."""
    numbers = [number for number, has in enumerate(are_sparse(model)) if has] or [model.layers]
    intervals = {after - before for before, after in pairwise(numbers)} or {1}
    return {START: numbers[0], END: numbers[-1], INTERVAL: min(intervals)}


def _write_ernie4_5_moe(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        "use_bias": False,
        "moe_num_experts": experts.count,
        "moe_k": experts.chosen,
        "moe_intermediate_size": experts.ffn,
        "moe_num_shared_experts": experts.shared,
        "moe_norm_min": experts.smallest_sum,
        **_write_sparse(model),
    }


ERNIE = {
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        reads=(*WITH_SILU, "use_bias"),
        defaults={**USUAL, "head_dim": 128},
        read=_ernie4_5,
        write=_write_ernie4_5,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        reads=(
            *WITH_SILU,
            *PATTERN,
            "moe_intermediate_size",
            "moe_k",
            "moe_norm_min",
            "moe_num_experts",
            "moe_num_shared_experts",
            "use_bias",
        ),
        defaults={
            **USUAL,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        read=_ernie4_5_moe,
        write=_write_ernie4_5_moe,
        renamed=("num_experts", "num_experts_per_tok"),
    ),
}
