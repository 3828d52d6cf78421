"""Mistral, Ministral, Ministral 3, Mistral Small 4 and Mixtral."""

from typing import Any

from spmdtrain.config.published.families.deepseek import READ_BY_LATENTS, read_latent, write_latent
from spmdtrain.config.published.families.expert_keys import (
    FIRST_DENSE,
    READ_BY_ROUTERS,
    after_first,
    experts_of,
    first_dense_of,
    read_experts,
    read_router,
    write_experts,
    write_router,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_layers,
    layer_types_of,
    read_windows,
    window_of,
)
from spmdtrain.config.published.families.query_temperature import (
    ROPE_KEYS,
    USUAL_ROPE,
    read_temperature,
    write_temperature,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import ORIGINAL, SHARE
from spmdtrain.config.schema import TransformerConfig


def _mistral(keys: Keys) -> ModelSettings:
    return read_windows(keys, all_layers(keys))


def _write_mistral(model: TransformerConfig) -> dict[str, Any]:
    return {"sliding_window": window_of(model)}


def _write_ministral(model: TransformerConfig) -> dict[str, Any]:
    return _write_mistral(model) | {"layer_types": layer_types_of(model)}


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


def _ministral3(keys: Keys) -> ModelSettings:
    return _mistral(keys) | read_temperature(keys)


def _write_ministral3(model: TransformerConfig) -> dict[str, Any]:
    return _write_mistral(model) | write_temperature(model)


def _mistral4(keys: Keys) -> ModelSettings:
    """Its share of rotated channels is that of the latent's: all those it sets apart."""
    latent = read_latent(keys)
    rope_dim, plain_dim = (latent["latent"][name] for name in ("rope_dim", "plain_dim"))
    for table in (keys.table("rope_scaling"), keys.table("rope_parameters")):
        share = (table or {}).get(SHARE)
        if share not in (None, rope_dim / (rope_dim + plain_dim)):
            raise keys.unknown(SHARE, share)
    return latent | after_first(keys, read_router(keys)) | read_temperature(keys)


def _write_mistral4(model: TransformerConfig) -> dict[str, Any]:
    latent = model.latent
    if latent is None or model.rope_scaling is None:  # which its class cannot do without
        return {}
    of_latent = write_latent(model, latent)
    grown = of_latent.pop("rope_parameters", {})
    of_latent.pop("rope_scaling", None)
    rope = write_temperature(model)
    return {
        **of_latent,
        **write_router(experts_of(model)),
        **rope,
        "rope_parameters": rope["rope_parameters"] | grown,
        "head_dim": latent.rope_dim + latent.plain_dim,
        FIRST_DENSE: first_dense_of(model),
    }


MISTRAL = {
    "mistral": Family(
        "MistralForCausalLM",
        reads=(*WITH_SILU, "sliding_window"),
        defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096},
        read=_mistral,
        write=_write_mistral,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        reads=(*WITH_SILU, "layer_types", "sliding_window"),
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
        read=_mistral,
        write=_write_ministral,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        reads=(*WITH_SILU, "sliding_window"),
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 1e6},
        read=_ministral3,
        write=_write_ministral3,
        default_rope=USUAL_ROPE | {"rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384},
        rope_keys=ROPE_KEYS,
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM",
        reads=(*WITH_SILU, *READ_BY_LATENTS, *READ_BY_ROUTERS, FIRST_DENSE),
        defaults={
            "rms_norm_eps": 1e-6,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            FIRST_DENSE: 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        read=_mistral4,
        write=_write_mistral4,
        default_rope=USUAL_ROPE | {"rope_theta": 1e4, "factor": 128.0, ORIGINAL: 8192},
        rope_keys=(*ROPE_KEYS, SHARE),
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
