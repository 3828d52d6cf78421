"""AFMoE (Trinity), whose positions turn in layers with a window, and in no other."""

from typing import Any

from spmdtrain.config.published.families.expert_keys import (
    BY_SIGMOID,
    after_first,
    experts_of,
    first_dense_of,
    read_experts,
    write_experts,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_but_each,
    layer_types_of,
    read_windows,
    window_of,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

PERIOD = "global_attn_every_n_layers"
# Keys of published files that repeat what the class does anyway.
ALWAYS = {
    "score_func": "sigmoid",
    "route_norm": True,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
}


def _afmoe(keys: Keys) -> ModelSettings:
    keys.must_be("attention_bias", False)  # which the gates would not have
    keys.pass_over("load_balance_coeff", "use_grouped_mm")
    for name, value in ALWAYS.items():
        keys.agrees(name, value)
    windows = read_windows(keys, all_but_each(keys, keys.some(PERIOD) or 1))
    settings = windows | {"rope_layers": [window > 0 for window in windows.get("windows", (0,))]}
    if keys.flag("mup_enabled"):
        settings["embed_scale"] = "sqrt"
    experts = read_experts(keys, "num_experts") | BY_SIGMOID
    experts |= {
        "ffn": keys.count("moe_intermediate_size"),
        "shared": keys.whole("num_shared_experts") or 0,
        "scale": float(keys.positive("route_scale") or 1),
    }
    return settings | after_first(keys, experts, "num_dense_layers")


def _write_afmoe(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        **write_experts(experts, "num_experts"),
        "moe_intermediate_size": experts.ffn,
        "num_shared_experts": experts.shared,
        "route_scale": experts.scale,
        "num_dense_layers": first_dense_of(model),
        "mup_enabled": model.embed_scale == "sqrt",
        "sliding_window": window_of(model),
        "layer_types": layer_types_of(model),
    }


AFMOE = {
    "afmoe": Family(
        "AfmoeForCausalLM",
        reads=(
            *WITH_SILU,
            PERIOD,
            "attention_bias",
            "layer_types",
            "moe_intermediate_size",
            "mup_enabled",
            "num_dense_layers",
            "num_experts",
            "num_experts_per_tok",
            "num_shared_experts",
            "route_scale",
            "sliding_window",
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            PERIOD: 4,
            "sliding_window": 1024,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
        },
        settings={"norm_places": "both", "query_norm": "head", "output_gate": "channel"},
        read=_afmoe,
        write=_write_afmoe,
    ),
}
