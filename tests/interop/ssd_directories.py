"""Tiny models of the families with Mamba-2: their config.json, and the names and shapes of their
tensors, as published files have them.
"""

from typing import Any

Shapes = dict[str, tuple[int, ...]]
# Depths that no period divides, and an epsilon of which an error shows.
COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "pad_token_id": 0,
}
NEMOTRON = COMMON | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME-M*EM",
    "num_hidden_layers": 7,
    "head_dim": 12,
    "intermediate_size": 40,
    "layer_norm_epsilon": 1e-3,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 9,
    "conv_kernel": 3,
    "use_conv_bias": True,
    "time_step_limit": [0.0, float("inf")],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 1.5,
}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_state": 9,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
}
GRANITE = (
    COMMON
    | MAMBA
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 5,
        "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
        "position_embedding_type": "nope",
        "intermediate_size": 40,
        "shared_intermediate_size": 28,
        "rms_norm_eps": 1e-3,
        "mamba_expand": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.17,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "rope_theta": 500.0,
    }
)
FALCON = (
    COMMON
    | MAMBA
    | {
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-3,
        "rope_theta": 500.0,
        "mamba_d_ssm": 60,
        "mamba_expand": 2,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 1.7,
        "mlp_multipliers": [1.4, 0.6],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.75,
        "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.9],
    }
)
CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron_h": NEMOTRON,
    "granitemoehybrid": GRANITE,
    "falcon_h1": FALCON,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "nemotron_h without a state space": NEMOTRON
    | {"hybrid_override_pattern": "*-E*-", "num_hidden_layers": 5, "conv_kernel": 3},
    "nemotron_h with a latent, as transformers 5 says it": {
        name: value
        for name, value in NEMOTRON.items()
        if name not in ("hybrid_override_pattern", "num_hidden_layers")
    }
    | {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "moe_latent_size": 16,
        "n_groups": 1,
        "conv_kernel": 2,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    },
    "nemotron_h without experts": NEMOTRON
    | {
        "hybrid_override_pattern": "M*M-M-*",
        "mlp_bias": True,
        "use_conv_bias": False,
        "head_dim": 8,
    },
    "granitemoehybrid without experts, as transformers 5 says it": GRANITE
    | {
        "num_local_experts": 0,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
        "position_embedding_type": "rope",
        "mamba_n_groups": 1,
        "mamba_conv_bias": False,
        "time_step_limit": [0.3, 1.1],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "falcon_h1, normed behind the gate, with biases": FALCON
    | {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 1,
        "mamba_d_conv": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 12,
    },
    "falcon_h1, normed before the gate": FALCON
    | {"mamba_rms_norm": True, "mamba_conv_bias": False, "mlp_multipliers": [1.0, 1.0]},
}
# Models of which the classes of transformers 5.24 do otherwise: that of Nemotron-H does not read
# its limit, and that of Granite looks for a cache's length in a layer with attention.
NOT_IN_TRANSFORMERS = {
    "nemotron_h, clamped": NEMOTRON | {"time_step_limit": [0.01, 0.7]},
    "granitemoehybrid without attention": GRANITE
    | {"layer_types": ["mamba"] * 5, "mamba_d_head": 16, "mamba_n_heads": 3, "mamba_n_groups": 3},
}
LETTERS = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}


def tensors_of(config: dict[str, Any]) -> Shapes:
    """The names and shapes of the tensors in the files of these families."""
    vocab, embed = config["vocab_size"], config["hidden_size"]
    kind = config["model_type"]
    layers = {"nemotron_h": _nemotron, "granitemoehybrid": _granite, "falcon_h1": _falcon}[kind]
    backbone = kind == "nemotron_h"
    table = "backbone.embeddings" if backbone else "model.embed_tokens"
    norms = {"nemotron_h": "backbone.norm_f", "falcon_h1": "model.final_layernorm"}
    shapes: Shapes = {f"{table}.weight": (vocab, embed)}
    for number, own in enumerate(layers(config)):
        place = f"{'backbone' if backbone else 'model'}.layers.{number}"
        shapes |= {f"{place}.{name}": shape for name, shape in own.items()}
    shapes[f"{norms.get(kind, 'model.norm')}.weight"] = (embed,)
    if config.get("num_nextn_predict_layers"):
        shapes |= _of_mtp(config)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    return shapes


def _nemotron(config: dict[str, Any]) -> list[Shapes]:
    kinds = config.get("hybrid_override_pattern")
    kinds = kinds or [LETTERS[kind] for kind in config["layers_block_type"]]
    embed, ffn = config["hidden_size"], config["intermediate_size"]
    of_state = ("n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias")
    heads, head_dim = config["mamba_num_heads"], config["mamba_head_dim"]
    parts = {
        "M": _mamba("mixer", embed, heads, head_dim, *(config[name] for name in of_state)),
        "*": _attention("mixer", config),
        "-": _mlp("mixer", ffn, embed),
        "E": _experts(config),
    }
    if config.get("mlp_bias"):
        parts["-"] |= {"mixer.up_proj.bias": (ffn,), "mixer.down_proj.bias": (embed,)}
    return [parts[kind] | {"norm.weight": (embed,)} for kind in kinds]


def _of_mtp(config: dict[str, Any]) -> Shapes:
    """Nemotron 3's block of a further token: two layers, in front of the first what joins."""
    embed, kinds = config["hidden_size"], config["mtp_hybrid_override_pattern"]
    shapes: Shapes = {}
    for number, own in enumerate(_nemotron(config | {"hybrid_override_pattern": kinds})):
        shapes |= {f"mtp.layers.{number}.{name}": shape for name, shape in own.items()}
    shapes |= {f"mtp.layers.0.{name}.weight": (embed,) for name in ("enorm", "hnorm")}
    shapes["mtp.layers.0.eh_proj.weight"] = (embed, 2 * embed)
    return shapes | {f"mtp.layers.{len(kinds) - 1}.final_layernorm.weight": (embed,)}


def _mlp(place: str, ffn: int, embed: int) -> Shapes:
    return {f"{place}.up_proj.weight": (ffn, embed), f"{place}.down_proj.weight": (embed, ffn)}


def _experts(config: dict[str, Any]) -> Shapes:
    count, embed = config["n_routed_experts"], config["hidden_size"]
    latent = config.get("moe_latent_size")
    shapes: Shapes = {
        "mixer.gate.weight": (count, embed),
        "mixer.gate.e_score_correction_bias": (count,),
    }
    for number in range(count):
        width = latent or embed
        shapes |= _mlp(f"mixer.experts.{number}", config["moe_intermediate_size"], width)
    if latent:
        shapes["mixer.fc1_latent_proj.weight"] = (latent, embed)
        shapes["mixer.fc2_latent_proj.weight"] = (embed, latent)
    shared = config["moe_shared_expert_intermediate_size"]
    return shapes | _mlp("mixer.shared_experts", shared, embed)


def _granite(config: dict[str, Any]) -> list[Shapes]:
    embed, shared = config["hidden_size"], config["shared_intermediate_size"]
    common: Shapes = {
        "input_layernorm.weight": (embed,),
        "post_attention_layernorm.weight": (embed,),
        "shared_mlp.input_linear.weight": (2 * shared, embed),
        "shared_mlp.output_linear.weight": (embed, shared),
    }
    if count := config["num_local_experts"]:
        ffn = config["intermediate_size"]
        common |= {
            "block_sparse_moe.router.layer.weight": (count, embed),
            "block_sparse_moe.input_linear.weight": (count, 2 * ffn, embed),
            "block_sparse_moe.output_linear.weight": (count, embed, ffn),
        }
    mamba = _mamba_by_keys(config, config["mamba_expand"] * embed)
    attention = _attention("self_attn", config)
    kinds = config["layer_types"]
    return [common | (mamba if kind[0] in "lm" else attention) for kind in kinds]


def _falcon(config: dict[str, Any]) -> list[Shapes]:
    embed, ffn = config["hidden_size"], config["intermediate_size"]
    layer: Shapes = {
        "input_layernorm.weight": (embed,),
        "pre_ff_layernorm.weight": (embed,),
        **_attention("self_attn", config),
        **_mamba_by_keys(config, config["mamba_d_ssm"]),
        **_mlp("feed_forward", ffn, embed),
        "feed_forward.gate_proj.weight": (ffn, embed),
    }
    if not config["mamba_rms_norm"]:
        del layer["mamba.norm.weight"]
    if config.get("mlp_bias"):
        widths = {"gate_proj": ffn, "up_proj": ffn, "down_proj": embed}
        layer |= {f"feed_forward.{name}.bias": (width,) for name, width in widths.items()}
    return [layer] * config["num_hidden_layers"]


def _mamba_by_keys(config: dict[str, Any], inner: int) -> Shapes:
    heads = config["mamba_n_heads"]
    sizes = (config[f"mamba_{name}"] for name in ("n_groups", "d_state", "d_conv", "conv_bias"))
    return _mamba("mamba", config["hidden_size"], heads, inner // heads, *sizes)


def _mamba(  # noqa: PLR0913 - all that its shapes consist of
    place: str,
    embed: int,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    taps: int,
    has_bias: bool,
) -> Shapes:
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state
    shapes: Shapes = {
        "in_proj.weight": (inner + channels + heads, embed),
        "conv1d.weight": (channels, 1, taps),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (embed, inner),
    }
    if has_bias:
        shapes["conv1d.bias"] = (channels,)
    return {f"{place}.{name}": shape for name, shape in shapes.items()}


def _attention(place: str, config: dict[str, Any]) -> Shapes:
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", embed // heads)
    wide, narrow = heads * dim, config["num_key_value_heads"] * dim
    widths = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
    shapes: Shapes = {f"{name}.weight": (width, embed) for name, width in widths.items()}
    shapes["o_proj.weight"] = (embed, wide)
    if config.get("attention_bias"):
        shapes |= {f"{name}.bias": (width,) for name, width in widths.items()}
        shapes["o_proj.bias"] = (embed,)
    return {f"{place}.{name}": shape for name, shape in shapes.items()}
