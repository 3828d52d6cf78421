"""Tiny models of the families with short convolutions: their config.json, and the names and shapes
of their tensors, as transformers writes them.
"""

from typing import Any

FULL = "full_attention"
Shapes = dict[str, tuple[int, ...]]
# Depths that no period divides, and an epsilon of which an error shows.
COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "dtype": "float32",
    "pad_token_id": 0,
}
LFM2 = COMMON | {
    "model_type": "lfm2",
    "norm_eps": 1e-3,
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_types": ["conv", FULL, "conv", "conv", FULL],
    "tie_word_embeddings": True,
    "intermediate_size": 100,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 12,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "lfm2": LFM2,
    "lfm2_moe": COMMON
    | {
        "model_type": "lfm2_moe",
        "norm_eps": 1e-3,
        "conv_L_cache": 4,
        "conv_bias": False,
        "layer_types": ["conv", "conv", FULL, "conv", FULL],
        "tie_word_embeddings": True,
        "intermediate_size": 72,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "use_expert_bias": True,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    # As published files have it.
    "lfm2 by its older keys": {
        name: value
        for name, value in LFM2.items()
        if name not in ("layer_types", "intermediate_size", "tie_word_embeddings")
    }
    | {
        "full_attn_idxs": [0, 3],
        "block_ff_dim": 90,
        "tie_embedding": False,
        "theta": 500.0,
        "block_dim": 48,
        "conv_dim": 48,
        "conv_dim_out": 48,
        "num_heads": 6,
        "block_norm_eps": 1e-3,
        "block_use_swiglu": True,
        "use_pos_enc": True,
        "block_mlp_init_scale": 1.0,
        "block_use_xavier_init": True,
    },
    "lfm2 with biases": LFM2
    | {"conv_bias": True, "conv_L_cache": 2, "head_dim": 12, "block_auto_adjust_ff_dim": False},
    "lfm2_moe, untied, without a bias": CONFIGS["lfm2_moe"]
    | {
        "tie_word_embeddings": False,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "num_dense_layers": 2,
        "head_dim": 12,
        "conv_bias": True,
    },
}


def tensors_of(config: dict[str, Any]) -> Shapes:
    """The names and shapes of the tensors in the files of LFM2 and LFM2-MoE."""
    vocab, embed = config["vocab_size"], config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, embed)}
    for layer in range(config["num_hidden_layers"]):
        own = _attention(config) if _has_attention(config, layer) else _convolution(config)
        is_dense = layer < config.get("num_dense_layers", config["num_hidden_layers"])
        own |= _mlp(config) if is_dense else _experts(config)
        own |= {f"{name}.weight": (embed,) for name in ("operator_norm", "ffn_norm")}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["model.embedding_norm.weight"] = (embed,)
    if not config.get("tie_embedding", config.get("tie_word_embeddings")):
        shapes["lm_head.weight"] = (vocab, embed)
    return shapes


def _has_attention(config: dict[str, Any], layer: int) -> bool:
    if kinds := config.get("layer_types"):
        return kinds[layer] == FULL
    return layer in config["full_attn_idxs"]


def _attention(config: dict[str, Any]) -> Shapes:
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", embed // heads)
    wide, narrow = heads * dim, config["num_key_value_heads"] * dim
    shapes: Shapes = {"q_proj": (wide, embed), "k_proj": (narrow, embed)}
    shapes |= {"v_proj": (narrow, embed), "out_proj": (embed, wide)}
    shapes |= {"q_layernorm": (dim,), "k_layernorm": (dim,)}
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _convolution(config: dict[str, Any]) -> Shapes:
    embed = config["hidden_size"]
    shapes: Shapes = {"in_proj.weight": (3 * embed, embed), "out_proj.weight": (embed, embed)}
    shapes["conv.weight"] = (embed, 1, config["conv_L_cache"])
    if config["conv_bias"]:
        shapes |= {"in_proj.bias": (3 * embed,), "conv.bias": (embed,), "out_proj.bias": (embed,)}
    return {f"conv.{name}": shape for name, shape in shapes.items()}


def _matrices(place: str, ffn: int, embed: int) -> Shapes:
    widths = {"w1": (ffn, embed), "w3": (ffn, embed), "w2": (embed, ffn)}
    return {f"{place}.{name}.weight": shape for name, shape in widths.items()}


def _mlp(config: dict[str, Any]) -> Shapes:
    ffn = config["block_ff_dim" if "block_ff_dim" in config else "intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        ffn = -(-int(config["block_ffn_dim_multiplier"] * int(2 * ffn / 3)) // multiple) * multiple
    return _matrices("feed_forward", ffn, config["hidden_size"])


def _experts(config: dict[str, Any]) -> Shapes:
    count, embed = config["num_experts"], config["hidden_size"]
    shapes: Shapes = {"feed_forward.gate.weight": (count, embed)}
    if config["use_expert_bias"]:
        shapes["feed_forward.expert_bias"] = (count,)
    for number in range(count):
        place = f"feed_forward.experts.{number}"
        shapes |= _matrices(place, config["moe_intermediate_size"], embed)
    return shapes
