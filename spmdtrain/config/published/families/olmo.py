"""OLMo 2 and 3, and those with experts: OLMoE and FlexOlmo."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.expert_keys import read_experts, write_experts
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_but_each,
    layer_types_of,
    read_windows,
    window_of,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

OLMO_LIKE = {"norm_places": "after", "query_norm": "all"}


def _olmo3(keys: Keys) -> ModelSettings:
    return read_biases(keys) | read_windows(keys, all_but_each(keys, 4))


def _write_olmo3(model: TransformerConfig) -> dict[str, Any]:
    return write_biases(model) | {
        "sliding_window": window_of(model) or 4096,
        "layer_types": layer_types_of(model),
    }


def _olmoe(keys: Keys) -> ModelSettings:
    keys.must_be("clip_qkv", None)
    experts = read_experts(keys, "num_experts") | {"normalise": keys.flag("norm_topk_prob")}
    return read_biases(keys) | {"experts": experts}


def _write_olmoe(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return {
        **write_biases(model),
        **write_experts(model.experts, "num_experts"),
        "intermediate_size": model.experts.ffn,
        "norm_topk_prob": model.experts.normalise,
    }


READ_BY_OLMOE = (
    *WITH_SILU,
    "attention_bias",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
)
OLMO = {
    "olmo2": Family(
        "Olmo2ForCausalLM",
        reads=(*WITH_SILU, "attention_bias"),
        defaults={"rms_norm_eps": 1e-5},
        settings=OLMO_LIKE,
        read=read_biases,
        write=write_biases,
        rope_kinds_in_4=("linear",),
        strict_scaling=("factor",),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        reads=(*WITH_SILU, "attention_bias", "layer_types", "sliding_window"),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        settings=OLMO_LIKE,
        read=_olmo3,
        write=_write_olmo3,
        rope_by_kind=True,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        reads=(*READ_BY_OLMOE, "clip_qkv"),
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        settings={"query_norm": "all"},
        read=_olmoe,
        write=_write_olmoe,
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        reads=READ_BY_OLMOE,
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e5,
            "num_experts": 7,
            "num_experts_per_tok": 5,
        },
        settings=OLMO_LIKE,
        read=_olmoe,
        write=_write_olmoe,
    ),
}
