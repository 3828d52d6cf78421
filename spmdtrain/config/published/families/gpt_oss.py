"""gpt-oss."""

from typing import Any

from spmdtrain.config.published.families.expert_keys import read_experts, write_experts
from spmdtrain.config.published.families.family import USUAL, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_but_each,
    layer_types_of,
    read_windows,
    window_of,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


def _gpt_oss(keys: Keys) -> ModelSettings:
    keys.take("initial_context_length")  # another key for the theta of the rotary positions
    keys.must_be("swiglu_limit", 7.0)
    keys.must_be("swiglu_alpha", 1.702)
    keys.pass_over("hidden_act")  # its class has one activation
    keys.whole("experts_per_token")  # another word for num_experts_per_tok
    keys.flag("attention_bias")
    experts = read_experts(keys, "num_local_experts") | {"logit_bias": True}
    return read_windows(keys, all_but_each(keys, 2)) | {"experts": experts}


def _write_gpt_oss(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return {
        **write_experts(model.experts, "num_local_experts"),
        "intermediate_size": model.experts.ffn,
        "sliding_window": window_of(model) or 128,
        "layer_types": layer_types_of(model),
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }


GPT_OSS = {
    "gpt_oss": Family(
        "GptOssForCausalLM",
        reads=(
            *USUAL,
            "attention_bias",
            "layer_types",
            "num_experts_per_tok",
            "num_local_experts",
            "sliding_window",
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        settings={
            "mlp": "swiglu_clamped",
            "sinks": True,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
        },
        read=_gpt_oss,
        write=_write_gpt_oss,
        packing="mxfp4",
    ),
}
