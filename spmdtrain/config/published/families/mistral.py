"""Mistral and Mixtral."""

from typing import Any

from spmdtrain.config.published.families.expert_keys import read_experts, write_experts
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import all_layers, read_windows, window_of
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


def _mistral(keys: Keys) -> ModelSettings:
    return read_windows(keys, all_layers(keys))


def _write_mistral(model: TransformerConfig) -> dict[str, Any]:
    return {"sliding_window": window_of(model)}


def _mixtral(keys: Keys) -> ModelSettings:
    experts = read_experts(keys, "num_local_experts") | {
        "jitter": float(keys.number("router_jitter_noise") or 0)
    }
    return {"experts": experts} | read_windows(keys, all_layers(keys))


def _write_mixtral(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return {
        **_write_mistral(model),
        **write_experts(model.experts, "num_local_experts"),
        "intermediate_size": model.experts.ffn,
        "router_jitter_noise": model.experts.jitter,
    }


MISTRAL = {
    "mistral": Family(
        "MistralForCausalLM",
        reads=(*WITH_SILU, "sliding_window"),
        defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096},
        read=_mistral,
        write=_write_mistral,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        reads=(*WITH_SILU, "num_experts_per_tok", "num_local_experts", "sliding_window"),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        read=_mixtral,
        write=_write_mixtral,
    ),
}
