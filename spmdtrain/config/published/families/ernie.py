"""ERNIE 4.5, dense and with experts."""

from typing import Any

from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

BIASES = ("qkv_bias", "out_bias", "mlp_bias")
PATTERN = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
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
    return _ernie4_5(keys) | {"experts": experts | _pattern(keys)}


def _pattern(keys: Keys) -> dict[str, int]:
    """Returns which layers have experts: every so many, from a first one to a last one."""
    layers = keys.count("num_hidden_layers")
    start, every = keys.whole(PATTERN[0]) or 0, keys.some(PATTERN[2]) or 1
    last = keys.number(PATTERN[1])
    last = layers - 1 if last in (None, -1) else last
    has_experts = [
        (number + 1) % every == 0 and start <= number <= last for number in range(layers)
    ]
    first_dense = has_experts.index(True) + 1 - every if any(has_experts) else layers
    rounds = range(max(first_dense, 0), layers)
    repeats = [(number + 1 - first_dense) % every == 0 for number in rounds]
    if first_dense == layers or first_dense < 0 or has_experts[first_dense:] != repeats:
        values = {name: keys.values.get(name) for name in PATTERN}
        raise keys.refused("the layers with experts", values, f"every {every}th up to the last")
    return {"first_dense": first_dense, "every": every}


def _write_ernie4_5_moe(model: TransformerConfig) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    return {
        **_write_ernie4_5(model),
        "moe_num_experts": experts.count,
        "moe_k": experts.chosen,
        "moe_intermediate_size": experts.ffn,
        "moe_num_shared_experts": experts.shared,
        "moe_norm_min": experts.smallest_sum,
        "moe_layer_start_index": experts.first_dense,
        "moe_layer_end_index": -1,
        "moe_layer_interval": experts.every,
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
