"""Qwen 2 and 3."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.expert_keys import (
    experts_of,
    in_layers,
    read_experts,
    read_steps,
    write_experts,
    write_steps,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_layers,
    layer_types_of,
    window_of,
    windows_if_used,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import WINDOW
from spmdtrain.config.schema import TransformerConfig

READ_BY_QWEN2 = (
    *WITH_SILU,
    "layer_types",
    "max_window_layers",
    "sliding_window",
    "use_sliding_window",
)


def _windows(keys: Keys) -> ModelSettings:
    """Reads `sliding_window`, which counts only with `use_sliding_window`, from layer
    `max_window_layers` on.
    """
    first = keys.whole("max_window_layers") or 0
    layers = keys.count("num_hidden_layers")
    return windows_if_used(keys, [number >= first for number in range(layers)])


def _qwen2(keys: Keys) -> ModelSettings:
    return {"qkv_bias": True} | _windows(keys)


def write_qwen2(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of windows, as Qwen 2 and the families after it write them."""
    kinds = layer_types_of(model)
    return {
        "use_sliding_window": WINDOW in kinds,
        "sliding_window": window_of(model),
        "max_window_layers": kinds.index(WINDOW) if WINDOW in kinds else len(kinds),
        "layer_types": kinds,
    }


def _qwen3(keys: Keys) -> ModelSettings:
    return read_biases(keys) | _windows(keys)


def _write_qwen3(model: TransformerConfig) -> dict[str, Any]:
    return write_qwen2(model) | write_biases(model)


def _qwen3_moe(keys: Keys) -> ModelSettings:
    renamed = "num_local_experts" if "num_local_experts" in keys else "num_experts"
    experts = read_experts(keys, renamed) | {
        "ffn": keys.count("moe_intermediate_size"),
        "normalise": keys.flag("norm_topk_prob"),
    }
    keys.pass_over("max_window_layers")
    windows = windows_if_used(keys, all_layers(keys))
    return read_biases(keys) | windows | in_layers(experts, read_steps(keys))


def _write_qwen3_moe(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        **_write_qwen3(model),
        **write_experts(experts, "num_experts"),
        "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.normalise,
        **write_steps(model),
    }


def _qwen2_moe(keys: Keys) -> ModelSettings:
    experts = read_experts(keys, "num_experts") | {
        "ffn": keys.count("moe_intermediate_size"),
        "normalise": keys.flag("norm_topk_prob"),
        "shared": 1,
        "shared_ffn": keys.count("shared_expert_intermediate_size"),
        "shared_gate": True,
    }
    first = keys.whole("max_window_layers") or 0
    layers = keys.count("num_hidden_layers")
    alternate = [number % 2 == 0 and number < first for number in range(layers)]
    biases = {"qkv_bias": True} if keys.flag("qkv_bias") else {}
    return biases | windows_if_used(keys, alternate) | in_layers(experts, read_steps(keys))


def _write_qwen2_moe(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        **write_qwen2(model),
        **write_experts(experts, "num_experts"),
        "qkv_bias": model.qkv_bias,
        "moe_intermediate_size": experts.ffn,
        "shared_expert_intermediate_size": experts.shared_width,
        "norm_topk_prob": experts.normalise,
        **write_steps(model),
    }


QWEN = {
    "qwen2": Family(
        "Qwen2ForCausalLM",
        reads=READ_BY_QWEN2,
        defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28},
        read=_qwen2,
        write=write_qwen2,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        reads=(*READ_BY_QWEN2, "attention_bias"),
        defaults={
            "rms_norm_eps": 1e-6,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        settings={"query_norm": "head"},
        read=_qwen3,
        write=_write_qwen3,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        reads=(
            *READ_BY_QWEN2,
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "qkv_bias",
            "shared_expert_intermediate_size",
        ),
        defaults={
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "decoder_sparse_step": 1,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        read=_qwen2_moe,
        write=_write_qwen2_moe,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        reads=(
            *WITH_SILU,
            "attention_bias",
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "sliding_window",
            "use_sliding_window",
        ),
        defaults={
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "decoder_sparse_step": 1,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        settings={"query_norm": "head"},
        read=_qwen3_moe,
        write=_write_qwen3_moe,
        renamed=("num_local_experts",),
    ),
}
