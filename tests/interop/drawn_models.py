"""Models near those of published families, drawn by a seed, and other values of published keys."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import directories
from pydantic import ValidationError

from spmdtrain.config.errors import UserError
from spmdtrain.config.published.read_config import as_published
from spmdtrain.config.published.rope_keys import FULL, WINDOW
from spmdtrain.config.published.write_config import as_model
from spmdtrain.config.schema import TransformerConfig

YARN = {"kind": "yarn", "factor": 4.0, "original_length": 16}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 32}
LONGROPE = "longrope"  # whose lists are as long as the channels that turn

TURNING = [name for name in directories.CONFIGS if name != "gpt2"]
SCALINGS: dict[str, Any] = {
    "linear": {"kind": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with a scale": YARN | {"scale": 1.3},
    "yarn with another ramp": YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "longrope": LONGROPE,
}

# Values of [model]; None takes a setting away.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "layers": (4, 5),
    "kv_heads": (1, 6),
    "head_dim": (8, 16),
    "ffn": (40,),
    "max_length": (32, 64),
    "mlp": ("swiglu", "geglu", "gelu", "gelu_exact", "swiglu_clamped", "relu2", "xielu"),
    "qkv_bias": (True, False),
    "out_bias": (True, False),
    "mlp_bias": (True, False),
    "tied": (True, False),
    "rope_theta": (10_000.0, 500_000.0, 2e6),
    "rope_theta_window": (90.0, 10_000.0),
    "rope_layers": ((True, False), (True, True, True, False)),
    "rope_share": (0.25, 0.5, 0.75),
    "rope_scaling": (
        None,
        {"kind": "linear", "factor": 2.0},
        LLAMA3,
        YARN,
        YARN | {"factor": 3.0, "truncate": False},
        YARN | {"original_length": 20, "scale": 1.3},
        LONGROPE,
    ),
    "windows": ((), (7,), (7, 0), (0, 7), (7, 7, 0), (16, 16, 16, 0), (0, 7, 7)),
    "score_scale": (None, 0.1),
    "score_cap": (None, 5.0),
    "sinks": (True, False),
    "query_norm": ("none", "head", "all", "after"),
    "chunks": ((7,), (7, 0)),
    "output_gate": ("channel", "head"),
    "norm_epsilon": (1e-3,),
    "norm_places": ("before", "after", "both", "parallel"),
    "norm_offset": (0.0, 1.0),
    "embed_scale": (1.0, "sqrt", 12.0),
    "residual_scale": (1.0, 0.22),
    "logit_scale": (1.0, 0.125),
    "logit_cap": (None, 3.0),
    "experts.normalise": (True, False),
    "experts.score": ("softmax", "sigmoid"),
    "experts.scale": (1.0, 2.0),
    "experts.logit_bias": (True, False),
    "experts.shared": (0, 1),
    "experts.shared_ffn": (40,),
    "experts.shared_gate": (True, False),
    "experts.own_norms": (True, False),
    "experts.learned_scale": (True, False),
    "experts.smallest_sum": (1e-12,),
    "experts.sum_epsilon": (1e-6, 0.1),
    "experts.gate_input": (True, False),
    "experts.first_dense": (0, 1),
    "experts.every": (2,),
    "experts.ffn": (16,),
    "experts.chosen": (1,),
    "experts.bias_rate": (0.0, None),
    "experts.groups": (1, 2),
    "value_norm": (True, False),
    "layer_scale": (True, False),
    "full": (None, {"head_dim": 8}),
    "full.kv_heads": (1, 2),
    "full.keys_are_values": (True, False),
    "latent.query_rank": (None, 8),
    "latent.rank": (12,),
    "latent.value_dim": (8,),
    "multi_token": (None, {"depth": 1}),
    "temperature": (None, {"weight": 0.1, "length": 16}),
}

# Another value of each key by which a class of transformers chooses what it computes.
OTHER_VALUES: dict[str, Any] = {
    "activation_function": "gelu",
    "add_cross_attention": True,
    "attention_bias": True,
    "attention_chunk_size": 7,
    "attn_scale": 0.3,
    "attn_temperature_tuning": False,
    "floor_scale": 5,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 72,
    "moe_layers": [0],
    "mup_enabled": True,
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 90,
    "block_ffn_dim_multiplier": 1.5,
    "block_multiple_of": 16,
    "conv_L_cache": 2,
    "conv_bias": True,
    "full_attn_idxs": [0],
    "global_attn_every_n_layers": 2,
    "norm_eps": 1e-2,
    "num_dense_layers": 2,
    "tie_embedding": True,
    "use_expert_bias": False,
    "attention_k_eq_v": True,
    "attention_multiplier": 0.7,
    "attention_out_bias": True,
    "attn_logit_softcapping": 2.0,
    "clip_qkv": 0.1,
    "decoder_sparse_step": 2,
    "embedding_multiplier": 3.0,
    "enable_moe_block": True,
    "final_logit_softcapping": 2.0,
    "first_k_dense_replace": 2,
    "global_head_dim": 8,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "linear_allow_neg_eigval": False,
    "linear_attn_config": {"head_dim": 6, "num_heads": 5, "short_conv_kernel_size": 3},
    "linear_head_dim": 6,
    "linear_num_heads": 5,
    "moe_renormalize": False,
    "num_expert_group": 2,
    "num_experts_per_token": 1,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_skip_topk_offset": 3,
    "index_topk": 9,
    "index_topk_freq": 3,
    "index_topk_pattern": "FSFSS",
    "indexer_types": ["full", "shared", "shared", "shared", "full"],
    "intermediate_size": 40,
    "kv_lora_rank": 12,
    "layer_norm_eps": 1e-2,
    **{"layer_norm_epsilon": 1e-2, "norm_epsilon": 1e-2},
    "layer_types": (WINDOW, FULL),
    "logit_scale": 3.0,
    "logits_scaling": 3.0,
    # Of Mamba-2.
    **{f"mamba_{name}": 3 for name in ("d_conv", "d_state", "n_groups")},
    **{"mamba_n_heads": 3, "mamba_d_head": 16, "mamba_d_ssm": 36, "mamba_expand": 3},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_hidden_act": "gelu"},
    **{"mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_rms_norm": True},
    **{"mamba_norm_before_gate": False, "use_bias": True, "use_conv_bias": False},
    **{"n_groups": 3, "ssm_state_size": 5, "conv_kernel": 4, "time_step_limit": [0.1, 0.4]},
    **{"layers_block_type": ["mamba"], "hybrid_override_pattern": "M*M-M-*"},
    **{"moe_latent_size": 12, "moe_shared_expert_intermediate_size": 12, "mlp_hidden_act": "silu"},
    **{"position_embedding_type": "rope", "shared_intermediate_size": 20},
    **{f"attention_{side}_multiplier": 0.6 for side in ("in", "out")},
    **{f"ssm_{side}_multiplier": 0.6 for side in ("in", "out")},
    **{"lm_head_multiplier": 0.6, "key_multiplier": 0.6, "mlp_multipliers": [0.6, 1.6]},
    **{"ssm_multipliers": [0.6, 1.0, 1.1, 0.8, 1.4], "projectors_bias": True},
    "max_window_layers": 2,
    "mlp_bias": True,
    "mlp_only_layers": [0],
    "mlp_layer_types": ("dense", "sparse"),
    "moe_intermediate_size": 16,
    "moe_k": 1,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 2,
    "moe_layer_start_index": 0,
    "moe_norm_min": 0.9,
    "moe_num_experts": 16,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "n_inner": 40,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "no_rope_layer_interval": 2,
    "no_rope_layers": (0, 1),
    "norm_topk_prob": False,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "num_global_key_value_heads": 1,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "num_local_experts": 2,
    "num_shared_experts": 2,
    "partial_rotary_factor": 0.25,
    "per_layer_config": {},
    "q_lora_rank": None,
    "qkv_bias": False,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "query_pre_attn_scalar": 7,
    "residual_multiplier": 0.7,
    "rms_norm_eps": 1e-2,
    "rope_interleave": False,
    "rope_local_base_freq": 11.0,
    "routed_scaling_factor": 1.0,
    "route_scale": 1.0,
    "router_scaling_factor": 1.0,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "shared_expert_intermediate_size": 16,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "top_k_experts": 1,
    "topk_group": 1,
    "use_bias": True,
    "use_bidirectional_attention": True,
    "use_double_wide_mlp": True,
    "use_qk_norm": True,
    "use_sliding_window": True,
    "v_head_dim": 8,
    "vocab_size_per_layer_input": 64,
}


def other_values(key: str, config: dict[str, Any]) -> Iterator[Any]:
    """Yields values of a key that differ from that of a config.json."""
    value = OTHER_VALUES[key]
    values = [value]
    if isinstance(value, tuple):  # a pattern over the layers
        layers = range(config.get("num_hidden_layers") or config["n_layer"])
        values = [[way[number % len(way)] for number in layers] for way in (value, value[::-1])]
    elif isinstance(value, bool):
        values.append(not value)
    yield from (value for value in values if key not in config or value != config[key])


def models(seeds: Iterable[int]) -> Iterator[TransformerConfig]:
    """Yields a model for each seed whose settings fit together."""
    for seed in seeds:
        try:
            yield as_model(_settings(seed))
        except (UserError, ValidationError):
            continue


def _settings(seed: int) -> dict[str, Any]:
    """Returns the settings of a published family with one to three of them changed."""
    random_ = random.Random(seed)
    family = list(directories.CONFIGS)[seed % len(directories.CONFIGS)]
    settings = dict(as_published(Path(), dict(directories.CONFIGS[family])).settings)
    for _ in range(random_.choice((1, 1, 2, 3))):
        name = random_.choice([*SETTINGS])
        change(settings, name, random_.choice(SETTINGS[name]))
    return settings


def change(settings: dict[str, Any], name: str, value: Any) -> None:
    """Sets a setting of [model], or of a table in it; None takes it away."""
    table, _, inner = name.rpartition(".")
    if table:
        if not settings.get(table):
            return
        settings[table] = dict(settings[table])
        settings, name = settings[table], inner
    if value == LONGROPE:
        turned = settings.get("head_dim", 8) * settings.get("rope_share", 1)
        latent = settings.get("latent") or {"rope_dim": turned}
        value = _longrope(int(latent["rope_dim"]) // 2)
    if value is None:
        settings.pop(name, None)
    else:
        settings[name] = value


def scaled_by_hand(name: str, scaling: str) -> TransformerConfig:
    """Returns the model of a published family with another scaling of its positions."""
    settings = dict(as_published(Path(), dict(directories.CONFIGS[name])).settings)
    change(settings, "rope_scaling", SCALINGS[scaling])
    return as_model(settings)


def _longrope(pairs: int) -> dict[str, Any]:
    """Returns a scaling whose factor is not the ratio of the lengths."""
    lists = {
        name: [1 + rise * pair for pair in range(pairs)]
        for name, rise in (("short", 0.1), ("long", 0.3))
    }
    return {"kind": LONGROPE, "factor": 3.0, "original_length": 16, "use": "long", **lists}
