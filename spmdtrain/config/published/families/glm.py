"""GLM-4 to 4.7, GLM-4.7-Flash, and two families in their manner: dots.llm1 and Solar Open."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.deepseek import READ_BY_LATENTS, read_latent, write_latent
from spmdtrain.config.published.families.expert_keys import (
    FIRST_DENSE,
    READ_BY_ROUTERS,
    after_first,
    experts_of,
    first_dense_of,
    in_layers,
    mlp_layer_types_of,
    read_grouped,
    read_sparse,
    write_grouped,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.further_layers import read_further, write_further
from spmdtrain.config.published.families.layer_windows import read_windows
from spmdtrain.config.published.families.qwen import write_qwen2
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import SHARE
from spmdtrain.config.schema import TransformerConfig

USUAL = {
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def _query_bias(keys: Keys) -> ModelSettings:
    """Returns the biases of queries, keys and values: `attention_bias` gives no other."""
    return {"qkv_bias": True} if keys.flag("attention_bias") else {}


def _glm4_moe(keys: Keys) -> ModelSettings:
    query_norm = {"query_norm": "head"} if keys.flag("use_qk_norm") else {}
    experts = after_first(keys, read_grouped(keys))
    return query_norm | _query_bias(keys) | experts | read_further(keys)


def _write_glm4_moe(model: TransformerConfig) -> dict[str, Any]:
    return {
        **write_biases(model),
        **write_grouped(experts_of(model)),
        **write_further(model),
        "use_qk_norm": model.query_norm == "head",
        FIRST_DENSE: first_dense_of(model),
    }


def _glm4_moe_lite(keys: Keys) -> ModelSettings:
    for table in (keys.values, keys.table("rope_parameters") or {}):
        if table.get(SHARE) not in (None, 1):  # of the rotated channels, of which some would turn
            raise keys.unknown(SHARE, table[SHARE])
    # Another name of qk_rope_head_dim, and the one that counts for its class.
    keys.agrees("head_dim", keys.values.get("qk_rope_head_dim"))
    sparse = read_sparse(keys)
    keys.agrees(FIRST_DENSE, sparse.count(False))  # which its class does not read
    return read_latent(keys) | in_layers(read_grouped(keys), sparse) | read_further(keys)


def _write_glm4_moe_lite(model: TransformerConfig) -> dict[str, Any]:
    if model.latent is None:
        return {}
    return {
        **write_latent(model, model.latent),
        **write_grouped(experts_of(model)),
        **write_further(model),
        "mlp_layer_types": mlp_layer_types_of(model),
    }


def _dots1(keys: Keys) -> ModelSettings:
    experts = after_first(keys, read_grouped(keys))
    first = keys.whole("max_window_layers") or 0
    layers = keys.count("num_hidden_layers")
    windows = read_windows(keys, [number >= first for number in range(layers)])
    return read_biases(keys) | windows | experts


def _write_dots1(model: TransformerConfig) -> dict[str, Any]:
    return {
        **write_biases(model),
        **write_grouped(experts_of(model)),
        **write_qwen2(model),
        FIRST_DENSE: first_dense_of(model),
    }


def _solar_open(keys: Keys) -> ModelSettings:
    """Its class has experts in all layers, so there is no mlp whose width could be read."""
    keys.agrees(FIRST_DENSE, 0)
    keys.pass_over("intermediate_size")
    experts = read_grouped(keys)
    return _query_bias(keys) | {"experts": experts, "ffn": experts["ffn"]}


def _write_solar_open(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return {**write_biases(model), **write_grouped(model.experts)}


# The defaults of both classes of GLM-4, that of 9B-chat and that of 0414.
OF_GLM4 = {
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    SHARE: 0.5,
}
READ_BY_GLM4 = (*WITH_SILU, SHARE, "attention_bias")
GLM = {
    "glm": Family(
        "GlmForCausalLM",
        reads=READ_BY_GLM4,
        defaults=OF_GLM4,
        read=_query_bias,
        write=write_biases,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        reads=READ_BY_GLM4,
        defaults=OF_GLM4,
        settings={"norm_places": "both"},
        read=_query_bias,
        write=write_biases,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        reads=(
            *WITH_SILU,
            *READ_BY_ROUTERS,
            SHARE,
            "attention_bias",
            FIRST_DENSE,
            "use_qk_norm",
        ),
        defaults=USUAL
        | {
            SHARE: 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            FIRST_DENSE: 1,
        },
        read=_glm4_moe,
        write=_write_glm4_moe,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        reads=(*WITH_SILU, *READ_BY_LATENTS, *READ_BY_ROUTERS, SHARE, "mlp_layer_types"),
        defaults=USUAL
        | {
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            FIRST_DENSE: 1,
        },
        read=_glm4_moe_lite,
        write=_write_glm4_moe_lite,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        reads=(
            *WITH_SILU,
            *READ_BY_ROUTERS,
            "attention_bias",
            FIRST_DENSE,
            "layer_types",
            "max_window_layers",
            "sliding_window",
        ),
        defaults=USUAL
        | {
            "rms_norm_eps": 1e-6,
            "n_shared_experts": None,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        settings={"query_norm": "head"},
        read=_dots1,
        write=_write_dots1,
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        reads=(
            *(name for name in WITH_SILU if name != "intermediate_size"),
            *READ_BY_ROUTERS,
            "attention_bias",
        ),
        defaults=USUAL
        | {
            "head_dim": 128,
            "rope_theta": 1e6,
            "intermediate_size": 1,  # of no layer
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
        },
        read=_solar_open,
        write=_write_solar_open,
    ),
}
