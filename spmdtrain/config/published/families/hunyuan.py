"""Hunyuan V3."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.expert_keys import (
    BY_SIGMOID,
    FIRST_DENSE,
    experts_of,
    in_layers,
    mlp_layer_types_of,
    read_experts,
    read_sparse,
    write_experts,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.further_layers import read_further, write_further
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


def _hy_v3(keys: Keys) -> ModelSettings:
    keys.must_be("mlp_bias", False, None)  # which its experts would not have
    experts = (
        read_experts(keys, "num_experts")
        | BY_SIGMOID
        | {
            "ffn": keys.count("moe_intermediate_size"),
            "shared": keys.whole("num_shared_experts") or 0,
            "scale": float(keys.positive("router_scaling_factor") or 1),
        }
    )
    sparse = read_sparse(keys)
    keys.agrees(FIRST_DENSE, sparse.count(False))  # which its class does not read
    return read_biases(keys) | in_layers(experts, sparse) | read_further(keys)


def _write_hy_v3(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        **write_biases(model),
        **write_experts(experts, "num_experts"),
        **write_further(model),
        "moe_intermediate_size": experts.ffn,
        "num_shared_experts": experts.shared,
        "router_scaling_factor": experts.scale,
        "mlp_layer_types": mlp_layer_types_of(model),
    }


HUNYUAN = {
    "hy_v3": Family(
        "HYV3ForCausalLM",
        reads=(
            *WITH_SILU,
            "attention_bias",
            "mlp_bias",
            "mlp_layer_types",
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "num_shared_experts",
            "router_scaling_factor",
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "head_dim": 128,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            FIRST_DENSE: 1,
        },
        settings={"query_norm": "head"},
        read=_hy_v3,
        write=_write_hy_v3,
    ),
}
