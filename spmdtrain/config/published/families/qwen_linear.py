"""Qwen 3.5 to 3.8 and Qwen3-Next: most of their layers have the gated delta rule."""

from typing import Any

from spmdtrain.config.published.families.activations import SILU
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
from spmdtrain.config.published.families.further_layers import read_apart, write_apart
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.families.listed_kinds import listed_kinds
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import FULL, SHARE
from spmdtrain.config.schema import TransformerConfig

LINEAR = "linear_attention"
MIXERS = {LINEAR: "delta", FULL: "attention"}
SIZES = {  # our settings of [model.delta] and theirs
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
READS = (*WITH_SILU, SHARE, "attention_bias", "layer_types", *SIZES.values())
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    SHARE: 0.25,
}
# The weights of the norms of the stream, of queries and of keys are those of files plus 1.
SETTINGS = {"query_norm": "head", "output_gate": "channel", "norm_offset": 1.0}


def _qwen3_5(keys: Keys) -> ModelSettings:
    mixers = [MIXERS[kind] for kind in _kinds(keys)]
    delta = {ours: keys.count(theirs) for ours, theirs in SIZES.items()}
    keys.pass_over("full_attention_interval")
    settings = read_biases(keys) | read_apart(keys)
    if "delta" in mixers:
        settings |= {"mixers": shortest(mixers), "delta": delta}
    return settings


def _kinds(keys: Keys) -> list[str]:
    """Returns the kind of each layer: `layer_types`, or each fourth with attention."""
    layers = keys.count("num_hidden_layers")
    kinds = listed_kinds(keys, MIXERS)
    if kinds is not None:
        return kinds
    interval = keys.some("full_attention_interval") or 4
    return [LINEAR if (number + 1) % interval else FULL for number in range(layers)]


def _write_qwen3_5(model: TransformerConfig) -> dict[str, Any]:
    theirs = {ours: kind for kind, ours in MIXERS.items()}
    if model.ssd or model.conv:
        return {}
    kinds = [theirs.get(mixer) for mixer in model.layer_mixers]
    sizes = {}
    if model.delta:
        sizes = {theirs: getattr(model.delta, ours) for ours, theirs in SIZES.items()}
    return write_biases(model) | {"layer_types": kinds} | sizes | write_apart(model)


def _qwen3_5_moe(keys: Keys) -> ModelSettings:
    return _qwen3_5(keys) | {"experts": _routed(keys)}


def _routed(keys: Keys) -> dict[str, Any]:
    return read_experts(keys, "num_experts") | {
        "ffn": keys.count("moe_intermediate_size"),
        "shared": 1,
        "shared_ffn": keys.count("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def _write_qwen3_5_moe(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        **_write_qwen3_5(model),
        **write_experts(experts, "num_experts"),
        "moe_intermediate_size": experts.ffn,
        "shared_expert_intermediate_size": experts.shared_width,
    }


def _qwen3_next(keys: Keys) -> ModelSettings:
    routed = _routed(keys) | {"normalise": keys.flag("norm_topk_prob")}
    return _qwen3_5(keys) | in_layers(routed, read_steps(keys))


def _write_qwen3_next(model: TransformerConfig) -> dict[str, Any]:
    return {
        **_write_qwen3_5_moe(model),
        "norm_topk_prob": experts_of(model).normalise,
        **write_steps(model),
    }


OF_EXPERTS = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
)
EXPERTS = {
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
MROPE = ("mrope_section", "mrope_interleaved")  # of pictures: tokens of text read none of it

QWEN_LINEAR = {
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        reads=READS,
        defaults=DEFAULTS,
        settings=SETTINGS,
        read=_qwen3_5,
        write=_write_qwen3_5,
        rope_keys=MROPE,
        further_apart=1,
        activations=SILU,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        reads=(*READS, *OF_EXPERTS),
        defaults={**DEFAULTS, **EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        settings=SETTINGS,
        read=_qwen3_5_moe,
        write=_write_qwen3_5_moe,
        rope_keys=MROPE,
        further_apart=1,
        activations=SILU,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        reads=(*READS, *OF_EXPERTS, "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"),
        defaults={
            **DEFAULTS,
            **EXPERTS,
            "decoder_sparse_step": 1,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        settings=SETTINGS,
        read=_qwen3_next,
        write=_write_qwen3_next,
        further_apart=1,
        activations=SILU,
    ),
}
