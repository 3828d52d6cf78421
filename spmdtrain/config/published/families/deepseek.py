"""DeepSeek-V3."""

import math
from typing import Any

from spmdtrain.config.published.families.expert_keys import read_experts
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import write_rope, yarn_scale
from spmdtrain.config.schema import TransformerConfig


def _deepseek_v3(keys: Keys) -> ModelSettings:
    keys.take("quantization_config")  # read with the weights
    keys.must_be("attention_bias", False, None)
    keys.must_be("rms_norm_eps", 1e-6)  # the norms of latents have a fixed one
    keys.must_be("rope_interleave", True)
    keys.must_be("moe_layer_freq", 1)
    keys.must_be("scoring_func", "sigmoid")
    keys.must_be("topk_method", "noaux_tc")
    for name in ("ep_size", "aux_loss_alpha", "seq_aux", "qk_head_dim"):
        keys.take(name)  # of training, or a sum of others
    latent = {
        "rank": keys.count("kv_lora_rank"),
        "query_rank": keys.some("q_lora_rank"),
        "plain_dim": keys.count("qk_nope_head_dim"),
        "rope_dim": keys.count("qk_rope_head_dim"),
        "value_dim": keys.count("v_head_dim"),
    }
    experts = read_experts(keys, "n_routed_experts") | {
        "ffn": keys.count("moe_intermediate_size"),
        "shared": keys.whole("n_shared_experts") or 0,
        "first_dense": keys.whole("first_k_dense_replace") or 0,
        "score": "sigmoid",
        "normalise": keys.flag("norm_topk_prob"),
        "scale": float(keys.positive("routed_scaling_factor") or 1),
        "groups": keys.some("n_group") or 1,
        "groups_kept": keys.some("topk_group"),
        "bias_rate": 0.0,
    }
    further = keys.whole("num_nextn_predict_layers")
    return {
        "kv_heads": None,
        "head_dim": None,
        "latent": {name: value for name, value in latent.items() if value is not None},
        "experts": experts,
        "multi_token": {"depth": further} if further else None,
        "score_scale": _score_scale(keys, latent["plain_dim"] + latent["rope_dim"]),
    }


def _score_scale(keys: Keys, width: int) -> float | None:
    """Returns the scale of attention scores, which grows with the length to which yarn extends."""
    scaling = dict(keys.table("rope_scaling") or {}) | dict(keys.table("rope_parameters") or {})
    times = scaling.get("mscale_all_dim")
    if not isinstance(times, int | float) or not times:
        return None
    return width**-0.5 * yarn_scale(float(scaling.get("factor") or 1), times) ** 2


def _write_deepseek_v3(model: TransformerConfig) -> dict[str, Any]:
    experts, latent = model.experts, model.latent
    if experts is None or latent is None:
        return {}
    keys = {
        "head_dim": latent.rope_dim,  # the width of its rotary positions
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": experts.shared,
        "first_k_dense_replace": experts.first_dense,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.groups_kept,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "rope_interleave": True,
        "num_nextn_predict_layers": model.multi_token.depth if model.multi_token else 0,
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


DEEPSEEK = {
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        reads=(
            *WITH_SILU,
            "attention_bias",
            "first_k_dense_replace",
            "kv_lora_rank",
            "moe_intermediate_size",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "rope_interleave",
            "routed_scaling_factor",
            "topk_group",
            "v_head_dim",
        ),
        defaults={
            "rms_norm_eps": 1e-6,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
        read=_deepseek_v3,
        write=_write_deepseek_v3,
        packing="fp8",
    ),
}
