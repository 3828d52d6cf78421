"""Tiny models of families with linear-time mixers: their config.json, and the names and shapes of
their tensors, as published.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

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
CONFIGS["olmo_hybrid"] = COMMON | {
    "model_type": "olmo_hybrid",
    "intermediate_size": 72,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "layer_types": [*["linear_attention"] * 3, FULL, "linear_attention"],
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
CONFIGS["kimi_linear"] = {
    name: value
    for name, value in COMMON.items()
    if name not in ("max_position_embeddings", "num_key_value_heads")
} | {
    "model_type": "kimi_linear",
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "model_max_length": 64,
    "intermediate_size": 72,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": [3, 5],
        "kda_layers": [1, 2, 4],
        "head_dim": 8,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "head_dim": 72,
    "mla_use_nope": True,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "use_grouped_topk": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
}
# Sequences of the tests are shorter than what the indexers keep.
SPARSE = {
    name: value
    for name, value in CONFIGS["kimi_linear"].items()
    if name in COMMON or name in ("intermediate_size", "rms_norm_eps", "tie_word_embeddings")
} | {
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "rope_theta": 500.0,
    **{
        name: CONFIGS["kimi_linear"][name]
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    },
    "q_lora_rank": 28,
    "head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "index_n_heads": 3,
    "index_head_dim": 12,
    "index_topk": 64,
}
CONFIGS |= {
    "deepseek_v32": SPARSE
    | {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 3,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "glm_moe_dsa": SPARSE | {"model_type": "glm_moe_dsa", "index_topk_freq": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa by a pattern": CONFIGS["glm_moe_dsa"]
    | {"index_topk_freq": None, "index_topk_pattern": "FSSFS", "tie_word_embeddings": True},
    "kimi_linear by its newer keys": {
        name: value
        for name, value in CONFIGS["kimi_linear"].items()
        if name not in ("linear_attn_config", "first_k_dense_replace", "head_dim")
    }
    | {
        "layer_types": ["linear_attention", FULL, *["linear_attention"] * 3],
        "linear_head_dim": 12,
        "linear_num_heads": 3,
        "linear_conv_kernel_dim": 2,
        "q_lora_rank": 28,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": False,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
    },
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
    "olmo_hybrid, tied, with rope": {
        name: value for name, value in CONFIGS["olmo_hybrid"].items() if name != "layer_types"
    }
    | {
        "rope_theta": 500.0,
        "rope_parameters": None,
        "linear_allow_neg_eigval": False,
        "linear_num_key_heads": 6,
        "linear_conv_kernel_dim": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_key_value_heads": 3,
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
    """The names and shapes of the tensors in the files of a family."""
    others = {"olmo_hybrid": _of_olmo, "kimi_linear": _of_kimi}
    others |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _of_sparse)
    return others.get(config["model_type"], _of_lfm)(config)


def _of_kimi(config: dict[str, Any]) -> Shapes:
    """Kimi Linear, with its dense layers under `mlp`."""
    vocab, embed = config["vocab_size"], config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, embed)}
    table, kinds = config.get("linear_attn_config", {}), config.get("layer_types")
    dense = config.get("mlp_layer_types", []).count("dense") or config["first_k_dense_replace"]
    for layer in range(config["num_hidden_layers"]):
        is_full = kinds[layer] == FULL if kinds else layer + 1 in table["full_attn_layers"]
        own = _latents(config) if is_full else _kimi_delta(config)
        own |= {f"{name}_layernorm.weight": (embed,) for name in ("input", "post_attention")}
        own |= _kimi_experts(config) if layer >= dense else {}
        own |= _newer("mlp", config["intermediate_size"], embed) if layer < dense else {}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes | {"model.norm.weight": (embed,), "lm_head.weight": (vocab, embed)}


def _of_sparse(config: dict[str, Any]) -> Shapes:
    """DeepSeek-V3 with an indexer in each layer, or in those that do not share one."""
    vocab, embed = config["vocab_size"], config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, embed)}
    heads, width = config["index_n_heads"], config["index_head_dim"]
    indexer: Shapes = {
        "wq_b.weight": (heads * width, config["q_lora_rank"]),
        "wk.weight": (width, embed),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, embed),
    }
    pattern = config.get("index_topk_pattern")
    for layer in range(config["num_hidden_layers"]):
        own = _latents(config)
        own |= {f"{name}_layernorm.weight": (embed,) for name in ("input", "post_attention")}
        is_dense = layer < config["first_k_dense_replace"]
        own |= _newer("mlp", config["intermediate_size"], embed) if is_dense else _grouped(config)
        period = config.get("index_topk_freq") or 1
        is_full = pattern[layer] == "F" if pattern else max(layer - 1, 0) % period == 0
        if is_full:
            own |= {f"self_attn.indexer.{name}": shape for name, shape in indexer.items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (embed,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    return shapes


def _grouped(config: dict[str, Any]) -> Shapes:
    count, embed, ffn = (
        config[name] for name in ("n_routed_experts", "hidden_size", "moe_intermediate_size")
    )
    shapes: Shapes = {"mlp.gate.weight": (count, embed)}
    shapes["mlp.gate.e_score_correction_bias"] = (count,)
    for number in range(count):
        shapes |= _newer(f"mlp.experts.{number}", ffn, embed)
    return shapes | _newer("mlp.shared_experts", ffn * config["n_shared_experts"], embed)


def _newer(place: str, ffn: int, embed: int) -> Shapes:
    widths = {"gate": (ffn, embed), "up": (ffn, embed), "down": (embed, ffn)}
    return {f"{place}.{name}_proj.weight": shape for name, shape in widths.items()}


def _kimi_experts(config: dict[str, Any]) -> Shapes:
    count, embed, ffn = (
        config[name] for name in ("num_experts", "hidden_size", "moe_intermediate_size")
    )
    place = "block_sparse_moe"
    shapes: Shapes = {f"{place}.gate.weight": (count, embed)}
    shapes[f"{place}.gate.e_score_correction_bias"] = (count,)
    for number in range(count):
        shapes |= _matrices(f"{place}.experts.{number}", ffn, embed)
    return shapes | _newer(f"{place}.shared_experts", ffn * config["num_shared_experts"], embed)


def _latents(config: dict[str, Any]) -> Shapes:
    embed, heads, rank, of_queries = (
        config[name]
        for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, shared, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    shapes: Shapes = {
        "kv_a_proj_with_mqa": (rank + shared, embed),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (plain + value), rank),
        "o_proj": (embed, heads * value),
    }
    name = "q_b_proj" if of_queries else "q_proj"
    shapes[name] = (heads * (plain + shared), of_queries or embed)
    if of_queries:
        shapes |= {"q_a_proj": (of_queries, embed), "q_a_layernorm": (of_queries,)}
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _kimi_delta(config: dict[str, Any]) -> Shapes:
    table = config.get("linear_attn_config", {})
    heads = table.get("num_heads", config.get("linear_num_heads"))
    width = table.get("head_dim", config.get("linear_head_dim"))
    taps = table.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim"))
    embed, wide = config["hidden_size"], heads * width
    shapes: Shapes = {f"{name}_proj.weight": (wide, embed) for name in "qkv"}
    shapes |= {f"{name}_conv1d.weight": (wide, 1, taps) for name in "qkv"}
    shapes |= {f"{name}_a_proj.weight": (width, embed) for name in "fg"}
    shapes |= {f"{name}_b_proj.weight": (wide, width) for name in "fg"}
    shapes |= {"b_proj.weight": (heads, embed), "o_proj.weight": (embed, wide)}
    shapes |= {"o_norm.weight": (width,), "A_log": (1, 1, heads, 1), "dt_bias": (wide,)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _of_olmo(config: dict[str, Any]) -> Shapes:
    """OLMo Hybrid: norms before the parts of linear layers, and after those of others."""
    vocab, embed, ffn = (
        config[name] for name in ("vocab_size", "hidden_size", "intermediate_size")
    )
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, embed)}
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        FULL if number % 4 == 3 else "linear_attention" for number in range(layers)
    ]
    for layer, kind in enumerate(kinds):
        own = _olmo_attention(config) if kind == FULL else _delta_apart(config)
        names = (
            ("post_attention", "post_feedforward") if kind == FULL else ("input", "post_attention")
        )
        own |= {f"{name}_layernorm.weight": (embed,) for name in names}
        own |= {f"mlp.{name}_proj.weight": (ffn, embed) for name in ("gate", "up")}
        own["mlp.down_proj.weight"] = (embed, ffn)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (embed,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    return shapes


def _olmo_attention(config: dict[str, Any]) -> Shapes:
    embed = config["hidden_size"]
    narrow = config["num_key_value_heads"] * embed // config["num_attention_heads"]
    rows = {"q": embed, "k": narrow, "v": narrow, "o": embed}
    shapes: Shapes = {f"{name}_proj.weight": (count, embed) for name, count in rows.items()}
    if config.get("attention_bias"):
        shapes |= {f"{name}_proj.bias": (count,) for name, count in rows.items()}
    shapes |= {"q_norm.weight": (embed,), "k_norm.weight": (narrow,)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _delta_apart(config: dict[str, Any]) -> Shapes:
    """The gated delta rule with a tensor for each of its projections and convolutions."""
    embed, value_heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = value_heads * config["linear_value_head_dim"]
    rows = {"q": keys, "k": keys, "v": values, "g": values, "a": value_heads, "b": value_heads}
    shapes: Shapes = {f"{name}_proj.weight": (count, embed) for name, count in rows.items()}
    taps = config["linear_conv_kernel_dim"]
    shapes |= {f"{name}_conv1d.weight": (rows[name], 1, taps) for name in "qkv"}
    shapes |= {
        "o_proj.weight": (embed, values),
        "o_norm.weight": (config["linear_value_head_dim"],),
    }
    shapes |= {"A_log": (value_heads,), "dt_bias": (value_heads,)}
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _of_lfm(config: dict[str, Any]) -> Shapes:
    """LFM2 and LFM2-MoE."""
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


Tensors = Mapping[str, np.ndarray]


def _renamed(tensors: Tensors, names: dict[str, str]) -> dict[str, np.ndarray]:
    """Tensors with one part of each name in place of another."""
    renamed = {}
    for name, x in tensors.items():
        parts = [part for part in names if part in name]
        renamed[name.replace(parts[0], names[parts[0]]) if parts else name] = x
    return renamed


def _recut(tensors: dict[str, np.ndarray], rows_of: Any) -> dict[str, np.ndarray]:
    """The convolutions of each layer, joined and cut after `rows_of(layer, rows of all)`."""
    recut = dict(tensors)
    for layer in {name.split("q_conv1d")[0] for name in tensors if "q_conv1d" in name}:
        names = [f"{layer}{part}_conv1d.weight" for part in "qkv"]
        joined = np.concatenate([tensors[name] for name in names])
        recut |= dict(zip(names, np.split(joined, rows_of(layer, len(joined))), strict=True))
    return recut


OLMO_NAMES = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


def _olmo_by_5_24(tensors: Tensors) -> dict[str, np.ndarray]:
    def equal_parts(_: str, rows: int) -> list[int]:
        return [-(-rows // 3), 2 * -(-rows // 3)]

    return _recut(_renamed(tensors, OLMO_NAMES), equal_parts)


def _olmo_as_published(tensors: Tensors) -> dict[str, np.ndarray]:
    def own_parts(layer: str, _: int) -> list[int]:
        queries, keys = (len(tensors[f"{layer}{part}_proj.weight"]) for part in "qk")
        return [queries, queries + keys]

    names = {saved: published for published, saved in OLMO_NAMES.items()}
    return _recut(_renamed(tensors, names), own_parts)


DENSE_NAMES = {f".mlp.{x}_proj": f".block_sparse_moe.{x}_proj" for x in ("gate", "up", "down")}


def _kimi_by_5_24(tensors: Tensors) -> dict[str, np.ndarray]:
    return _renamed(tensors, DENSE_NAMES)


def _kimi_as_published(tensors: Tensors) -> dict[str, np.ndarray]:
    return _renamed(tensors, {saved: published for published, saved in DENSE_NAMES.items()})


def _in_memory(tensors: Tensors) -> dict[str, np.ndarray]:
    """With one convolution of a layer, and the parts of a decay below their module."""
    joined = {}
    for name, x in tensors.items():
        parts = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        if name == parts[0] and name != parts[1]:
            joined[name.replace("q_conv1d", "conv1d")] = np.concatenate([tensors[n] for n in parts])
        elif "_conv1d" not in name:
            joined[name] = x
    if not any("f_a_proj" in name for name in joined):
        return joined
    decay = {f"self_attn.{x}": f"self_attn.forget_gate.{x}" for x in DECAY}
    return _renamed(joined, decay)


DECAY = ("A_log", "dt_bias", "f_a_proj", "f_b_proj")
# What transformers 5.24 makes of published tensors where it writes others, and the way back.
SAVED_BY_5_24 = {"olmo_hybrid": _olmo_by_5_24, "kimi_linear": _kimi_by_5_24}
# The tensors that transformers 5.24 writes with `save_original_format=False`.
IN_MEMORY = dict.fromkeys(SAVED_BY_5_24, _in_memory)
AS_PUBLISHED = {"olmo_hybrid": _olmo_as_published, "kimi_linear": _kimi_as_published}
