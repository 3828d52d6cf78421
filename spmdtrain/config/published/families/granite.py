"""Granite 3, dense and with experts, of which some models share an mlp."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases
from spmdtrain.config.published.families.expert_keys import read_experts, write_experts
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.llama import write_llama
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


def read_granite(keys: Keys) -> ModelSettings:
    """Returns the biases, and the factors of scores, embedding, stream and logits."""
    return read_biases(keys) | {
        "score_scale": float(keys.positive("attention_multiplier") or 1),
        "embed_scale": float(keys.positive("embedding_multiplier") or 1),
        "residual_scale": float(keys.positive("residual_multiplier") or 1),
        "logit_scale": 1 / (keys.positive("logits_scaling") or 1),
    }


def write_granite(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that `read_granite` reads."""
    return write_llama(model) | {
        "attention_multiplier": model.score_factor or model.head_dim**-0.5,
        "embedding_multiplier": model.embed_factor,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": 1 / model.logit_factor,
    }


def _granitemoe(keys: Keys) -> ModelSettings:
    return read_granite(keys) | {"experts": read_experts(keys, "num_local_experts")}


def _write_granitemoe(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return {
        **write_granite(model),
        **write_experts(model.experts, "num_local_experts"),
        "intermediate_size": model.experts.ffn,
    }


def _granitemoeshared(keys: Keys) -> ModelSettings:
    settings = _granitemoe(keys)
    shared = keys.whole(SHARED)
    if not shared:
        return settings
    return settings | {"experts": settings["experts"] | {"shared": 1, "shared_ffn": shared}}


def _write_granitemoeshared(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return _write_granitemoe(model) | {SHARED: model.experts.shared_width}


SHARED = "shared_intermediate_size"
SCALES = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
GRANITE = {
    "granite": Family(
        "GraniteForCausalLM",
        reads=(
            *WITH_SILU,
            *SCALES,
            "attention_bias",
            "mlp_bias",
        ),
        defaults={"rms_norm_eps": 1e-6},
        read=read_granite,
        write=write_granite,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        reads=(
            *WITH_SILU,
            *SCALES,
            "attention_bias",
            "num_experts_per_tok",
            "num_local_experts",
        ),
        defaults={"rms_norm_eps": 1e-6, "num_local_experts": 8, "num_experts_per_tok": 2},
        read=_granitemoe,
        write=_write_granitemoe,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        reads=(
            *WITH_SILU,
            *SCALES,
            "attention_bias",
            "num_experts_per_tok",
            "num_local_experts",
            SHARED,
        ),
        defaults={
            "rms_norm_eps": 1e-6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            SHARED: 0,
        },
        read=_granitemoeshared,
        write=_write_granitemoeshared,
    ),
}
