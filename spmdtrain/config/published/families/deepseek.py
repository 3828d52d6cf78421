"""DeepSeek-V3."""

import math
from typing import Any

from spmdtrain.config.published.families.expert_keys import (
    FIRST_DENSE,
    READ_BY_ROUTERS,
    after_first,
    experts_of,
    first_dense_of,
    read_grouped,
    write_grouped,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.further_layers import read_further, write_further
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import write_rope, yarn_scale
from spmdtrain.config.schema import LatentConfig, TransformerConfig

# The defaults of DeepSeek-V3's class, and of those that follow it.
LATENT_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
READ_BY_LATENTS = (
    "attention_bias",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "v_head_dim",
)
EPSILON = 1e-6  # of the norms of latents, whatever rms_norm_eps says


def read_latent(keys: Keys) -> ModelSettings:
    """Returns the settings of latent attention."""
    keys.must_be("attention_bias", False, None)
    keys.must_be("rope_interleave", True)
    keys.pass_over("qk_head_dim")  # a sum of others
    latent = {
        "rank": keys.count("kv_lora_rank"),
        "query_rank": keys.some("q_lora_rank"),
        "plain_dim": keys.count("qk_nope_head_dim"),
        "rope_dim": keys.count("qk_rope_head_dim"),
        "value_dim": keys.count("v_head_dim"),
        "epsilon": EPSILON,
    }
    return {
        "kv_heads": None,
        "head_dim": None,
        "latent": {name: value for name, value in latent.items() if value is not None},
        "score_scale": _score_scale(keys, latent["plain_dim"] + latent["rope_dim"]),
    }


def _score_scale(keys: Keys, width: int) -> float | None:
    """Returns the scale of attention scores, which grows with the length to which yarn extends."""
    scaling = dict(keys.table("rope_scaling") or {}) | dict(keys.table("rope_parameters") or {})
    times = scaling.get("mscale_all_dim")
    if not isinstance(times, int | float) or not times:
        return None
    return width**-0.5 * yarn_scale(float(scaling.get("factor") or 1), times) ** 2


def write_latent(model: TransformerConfig, latent: LatentConfig) -> dict[str, Any]:
    """Returns the keys of latent attention, and those of rotary positions whose scale grows."""
    keys = {
        "head_dim": latent.rope_dim,  # the width of its rotary positions
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": False,
        "rope_interleave": True,
    }
    scaling = model.rope_scaling
    if model.score_scale is None or scaling is None or scaling.factor == 1:
        return keys
    grown = (model.score_scale * model.head_dim**0.5) ** 0.5
    times = round((grown - 1) / (0.1 * math.log(scaling.factor)), 6)
    written = write_rope(model)
    for name in ("rope_scaling", "rope_parameters"):
        keys[name] = written[name] | {"mscale_all_dim": times}
    return keys


def _deepseek_v3(keys: Keys) -> ModelSettings:
    keys.must_be("moe_layer_freq", 1)
    for name in ("ep_size", "aux_loss_alpha", "seq_aux"):
        keys.take(name)  # of training
    return read_latent(keys) | after_first(keys, read_grouped(keys)) | read_further(keys)


def _write_deepseek_v3(model: TransformerConfig) -> dict[str, Any]:
    if model.latent is None:
        return {}
    return {
        **write_latent(model, model.latent),
        **write_grouped(experts_of(model)),
        FIRST_DENSE: first_dense_of(model),
        "moe_layer_freq": 1,
        **write_further(model),
    }


DEEPSEEK = {
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        reads=(*WITH_SILU, *READ_BY_LATENTS, *READ_BY_ROUTERS, FIRST_DENSE),
        defaults={
            "rms_norm_eps": 1e-6,
            **LATENT_SIZES,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            FIRST_DENSE: 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
        read=_deepseek_v3,
        write=_write_deepseek_v3,
    ),
}
