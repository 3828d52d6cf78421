"""Tiny directories of Gemma 4, named and shaped as transformers writes them."""

from typing import Any

import numpy as np

FULL, WINDOW = "full_attention", "sliding_attention"
OF_KEYS = ("k_proj", "v_proj", "k_norm")
PRE, POST = "pre_feedforward", "post_feedforward"
Shapes = dict[str, tuple[int, ...]]
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 72,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 7,
    "pad_token_id": 0,  # or that of the class, which is beyond this vocabulary
    "dtype": "float32",
}
DENSE = SIZES | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 7,  # no multiple of the three kinds of layers
    "layer_types": [WINDOW, WINDOW, FULL] * 2 + [FULL],
    "global_head_dim": 24,
    "num_global_key_value_heads": 3,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4_text": DENSE,
    "gemma4_unified_text": SIZES
    | {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 6,
        "global_head_dim": 20,
        "rope_parameters": {
            WINDOW: {"rope_type": "default", "rope_theta": 90.0},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
                "factor": 1.5,
            },
        },
    },
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
TOKENS = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 140}
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4_text by per_layer_config": {
        name: value for name, value in DENSE.items() if name != "global_head_dim"
    }
    | {
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "attention_k_eq_v": False,
        "layer_types": [WINDOW, FULL, WINDOW, WINDOW],  # the last is full all the same
        "per_layer_config": {
            "1": {"head_dim": 24, "num_key_value_heads": 1},
            "3": {"head_dim": 24, "num_key_value_heads": 1},
        },
        "rope_parameters": {
            WINDOW: {"rope_type": "default", "rope_theta": 90.0},
            FULL: {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
        },
    },
    "gemma4_text without windows": DENSE
    | {"layer_types": [FULL] * 7, "attention_k_eq_v": False, "attention_bias": True},
    "gemma4_text with embeddings of layers": DENSE | TOKENS,
    "gemma4_text with shared keys": DENSE
    | TOKENS
    | {
        "num_hidden_layers": 8,
        "layer_types": [WINDOW, WINDOW, FULL] * 2 + [WINDOW, FULL],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
    },
    "gemma4_text with experts": DENSE | EXPERTS,
    "gemma4_text with experts and shared keys": DENSE
    | TOKENS
    | EXPERTS
    | {
        "num_hidden_layers": 5,
        "layer_types": [FULL, WINDOW, FULL, WINDOW, FULL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_text with biases": DENSE
    | {
        "num_hidden_layers": 4,
        "layer_types": [WINDOW, FULL, WINDOW, FULL],
        "num_kv_shared_layers": 1,
        "attention_bias": True,
    },
    "gemma4_text, one width": DENSE | {"per_layer_config": {}, "attention_k_eq_v": False},
}


# Models of other parts than those of `CONFIGS`: each has rows in the docs.
KINDS = ("gemma4_text with shared keys", "gemma4_text with experts")


def with_small_scores(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Halves the norms of queries and keys: their products are not divided by the root of their
    width, and a softmax of large ones enlarges the rounding of both libraries to 4e-6.
    """
    halved = ("q_norm.weight", "k_norm.weight")
    return {
        name: x * x.dtype.type(0.5 if name.endswith(halved) else 1) for name, x in tensors.items()
    }


def layer_tensors(config: dict[str, Any], layer: int) -> Shapes:
    """The tensors of a layer."""
    embed, ffn = config["hidden_size"], config["intermediate_size"]
    found = {**_attention(config, layer), "layer_scalar": (1,)}
    if config.get("use_double_wide_mlp") and _shares(config, layer):
        ffn *= 2
    found |= {f"mlp.{name}_proj.weight": (ffn, embed) for name in ("gate", "up")}
    found["mlp.down_proj.weight"] = (embed, ffn)
    if dim := config.get("hidden_size_per_layer_input"):
        found["per_layer_input_gate.weight"] = (dim, embed)
        found["per_layer_projection.weight"] = (embed, dim)
        found["post_per_layer_input_norm.weight"] = (embed,)
    norms = [f"{at}_layernorm" for at in ("input", "post_attention", PRE, POST)]
    if config.get("enable_moe_block"):
        found |= _experts(config)
        norms += [f"{PRE}_layernorm_2", f"{POST}_layernorm_1", f"{POST}_layernorm_2"]
    return found | {f"{name}.weight": (embed,) for name in norms}


def _experts(config: dict[str, Any]) -> Shapes:
    """The tensors of experts beside the mlp, and of their router."""
    embed, ffn = config["hidden_size"], config["moe_intermediate_size"]
    count = config["num_experts"]
    return {
        "router.proj.weight": (count, embed),
        "router.scale": (embed,),
        "router.per_expert_scale": (count,),
        "experts.gate_up_proj": (count, 2 * ffn, embed),
        "experts.down_proj": (count, embed, ffn),
    }


def whole_tensors(config: dict[str, Any]) -> Shapes:
    """The tensors that all layers share, by their embeddings."""
    dim = config.get("hidden_size_per_layer_input")
    if not dim:
        return {}
    width = dim * config["num_hidden_layers"]
    return {
        "model.embed_tokens_per_layer.weight": (config["vocab_size_per_layer_input"], width),
        "model.per_layer_model_projection.weight": (width, config["hidden_size"]),
        "model.per_layer_projection_norm.weight": (dim,),
    }


def _attention(config: dict[str, Any], layer: int) -> Shapes:
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    dim, kv_heads = _heads(config, layer)
    has_values = _is_window(config, layer) or not config.get("attention_k_eq_v")
    rows = {"q": heads * dim, "k": kv_heads * dim} | ({"v": kv_heads * dim} if has_values else {})
    found: Shapes = {f"self_attn.{name}_proj.weight": (wide, embed) for name, wide in rows.items()}
    found["self_attn.o_proj.weight"] = (embed, heads * dim)
    if config.get("attention_bias"):
        found |= {f"self_attn.{name}_proj.bias": (wide,) for name, wide in rows.items()}
        found["self_attn.o_proj.bias"] = (embed,)
    found |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    if _shares(config, layer):
        found = {name: x for name, x in found.items() if name.split(".")[1] not in OF_KEYS}
    return found


def idle_tensors(config: dict[str, Any]) -> Shapes:
    """The tensors of keys and values that published files have in layers that share others."""
    alone = config | {"num_kv_shared_layers": 0}
    layers = range(
        config["num_hidden_layers"] - config["num_kv_shared_layers"], config["num_hidden_layers"]
    )
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in layers
        for name, shape in _attention(alone, layer).items()
        if name.split(".")[1] in OF_KEYS
    }


def _shares(config: dict[str, Any], layer: int) -> bool:
    """True for a layer that has no keys and values."""
    return layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)


def _heads(config: dict[str, Any], layer: int) -> tuple[int, int]:
    """(channels of a head, key-value heads) of a layer."""
    usual = {name: config[name] for name in ("head_dim", "num_key_value_heads")}
    if "per_layer_config" in config:
        own = usual | config["per_layer_config"].get(str(layer), {})
    elif _is_window(config, layer):
        own = usual
    else:
        own = {"head_dim": config.get("global_head_dim", 512)}
        is_given = config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")
        own["num_key_value_heads"] = is_given or usual["num_key_value_heads"]
    return own["head_dim"], own["num_key_value_heads"]


def _is_window(config: dict[str, Any], layer: int) -> bool:
    if layer == config["num_hidden_layers"] - 1:
        return False
    if kinds := config.get("layer_types"):
        return kinds[layer] == WINDOW
    return (layer + 1) % 6 != 0
