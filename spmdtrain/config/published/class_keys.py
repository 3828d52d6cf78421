"""The keys of config.json that change what the classes of transformers compute.

Found by running each class of 4.57 and 5.24 with another value of each key: it counts as read if
both then compute something else. `tests/interop/test_class_keys.py` measures the table again.
"""

from collections.abc import Mapping
from typing import Any

from spmdtrain.config.errors import ConfigError

SHARE, WINDOW_THETA = "partial_rotary_factor", "rope_local_base_freq"
_SIZES = ("head_dim", "intermediate_size", "num_key_value_heads")
_ALL = (*_SIZES, "rms_norm_eps", "tie_word_embeddings")
_SILU = (*_ALL, "hidden_act")
_QWEN2 = (*_SILU, "layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
_GEMMA = (
    *_ALL,
    "attention_bias",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
)
_EXPERTS = ("num_experts_per_tok", "num_local_experts")

_READ: Mapping[str, tuple[str, ...]] = {
    "gpt2": (
        "activation_function",
        "add_cross_attention",
        "layer_norm_epsilon",
        "n_inner",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "tie_word_embeddings",
    ),
    "llama": (*_SILU, "attention_bias", "mlp_bias"),
    "mistral": (*_SILU, "sliding_window"),
    "qwen2": _QWEN2,
    "qwen3": (*_QWEN2, "attention_bias"),
    "gemma2": (*_GEMMA, "attn_logit_softcapping"),
    "gemma3_text": (
        *_GEMMA,
        WINDOW_THETA,
        "sliding_window_pattern",
        "use_bidirectional_attention",
    ),
    "phi3": (*_SILU, SHARE, "sliding_window"),
    "olmo2": (*_SILU, "attention_bias"),
    "olmo3": (*_SILU, "attention_bias", "layer_types", "sliding_window"),
    "smollm3": (
        *_SILU,
        "attention_bias",
        "layer_types",
        "mlp_bias",
        "no_rope_layer_interval",
        "no_rope_layers",
        "sliding_window",
        "use_sliding_window",
    ),
    "granite": (
        *_SILU,
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "mlp_bias",
        "residual_multiplier",
    ),
    "gpt_oss": (*_ALL, *_EXPERTS, "attention_bias", "layer_types", "sliding_window"),
    "mixtral": (*_SILU, *_EXPERTS, "sliding_window"),
    "qwen3_moe": (
        *_SILU,
        "attention_bias",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "sliding_window",
        "use_sliding_window",
    ),
    "deepseek_v3": (
        *_SILU,
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
}
READ: Mapping[str, frozenset[str]] = {family: frozenset(keys) for family, keys in _READ.items()}
CHOOSING = frozenset().union(*READ.values())
# Another name of a key in files of transformers 5.
RENAMED = {"qwen3_moe": frozenset({"num_local_experts"})}
# The kinds of rope that a class accepts, where it does not accept all of them.
ROPE_KINDS: Mapping[str, tuple[str, ...]] = {"phi3": ("longrope",), "olmo2": ("linear",)}
# All that `rope_scaling` may hold beside its type in the classes of transformers 4 that are strict.
STRICT_SCALING: Mapping[str, tuple[str, ...]] = {
    "phi3": ("short_factor", "long_factor"),
    "olmo2": ("factor",),
}


def unread_by_class(family: str) -> frozenset[str]:
    """Returns the keys that choose something in other families only."""
    return CHOOSING - READ[family] - RENAMED.get(family, frozenset())


def check_share(family: str, share: Any, where: str) -> None:
    """Raises ConfigError if a file rotates only a share of a head's channels, but the class of its
    family rotates all: transformers 5 then ignores the key, and transformers 4 stops.
    """
    if share in (None, 1) or SHARE in READ[family]:
        return
    raise ConfigError(
        f"{where}: {SHARE}={share!r:.40}, but transformers' class of {family} turns all channels",
        fix=f"{SHARE}=1, if the model was trained so",
    )
