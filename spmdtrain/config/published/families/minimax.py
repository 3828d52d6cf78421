"""MiniMax-M2."""

from typing import Any

from spmdtrain.config.published.families.expert_keys import BY_SIGMOID, read_experts, write_experts
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import SHARE
from spmdtrain.config.schema import TransformerConfig

TURNED = "rotary_dim"  # the older key of the channels that are rotated


def _minimax_m2(keys: Keys) -> ModelSettings:
    keys.must_be("router_jitter_noise", 0, None)
    keys.must_be("scoring_func", "sigmoid")
    keys.must_be("use_routing_bias", True)
    keys.agrees("use_qk_norm", True)
    keys.must_be("qk_norm_type", "per_layer")
    keys.must_be("shared_intermediate_size", 0, None)
    layers = keys.count("num_hidden_layers")
    keys.must_be("attn_type_list", None, [1] * layers)  # 1 is softmax attention
    for name in ("full_attention", "linear_attention", "mlp"):
        keys.must_be(f"layernorm_{name}_beta", 1.0)
    # Of layers that its files do not have, or that predict further tokens and are not read.
    keys.pass_over("mlp_intermediate_size", "shared_moe_mode")
    keys.pass_over("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    renamed = "num_experts" if "num_experts" in keys else "num_local_experts"
    return {"experts": read_experts(keys, renamed) | BY_SIGMOID} | _share(keys)


def _share(keys: Keys) -> ModelSettings:
    """Returns the share of channels that are rotated, if only the older key says it."""
    turned = keys.some(TURNED)
    newer = dict(keys.table("rope_scaling") or {}) | dict(keys.table("rope_parameters") or {})
    if turned is None or SHARE in keys or SHARE in newer:
        return {}
    width = keys.some("head_dim") or keys.count("hidden_size") // keys.count("num_attention_heads")
    if turned > width:
        raise keys.refused(TURNED, turned, f"at most head_dim={width}")
    return {"rope_share": turned / width}


def _write_minimax_m2(model: TransformerConfig) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    return {
        **write_experts(experts, "num_local_experts"),
        "intermediate_size": experts.ffn,
        TURNED: model.rope_dim,
        SHARE: model.rope_share,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    }


MINIMAX = {
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        reads=(*WITH_SILU, SHARE, "num_experts_per_tok", "num_local_experts"),
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        settings={"query_norm": "all"},
        read=_minimax_m2,
        write=_write_minimax_m2,
        renamed=("num_experts",),
    ),
}
