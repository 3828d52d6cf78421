"""The families of published models: the function of each, and the keys peculiar to it.

A family has the defaults for absent keys (those of its class in transformers, not ours), the
settings shared by all of its models, and two functions that read and write its own keys.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import (
    FULL,
    ORIGINAL,
    WINDOW,
    read_rope,
    write_rope,
    yarn_scale,
)
from spmdtrain.config.schema import TransformerConfig

ModelSettings = dict[str, Any]  # of [model]

# Activations of an mlp: without a gate, and with one.
PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact"}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}


def _none(keys: Keys) -> ModelSettings:  # noqa: ARG001 - as the others
    return {}


def _no_keys(model: TransformerConfig) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models. `read` and `write` handle the keys that not all families have."""

    architecture: str  # the class of transformers
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Keys], ModelSettings] = _none
    write: Callable[[TransformerConfig], dict[str, Any]] = _no_keys
    activation: str = "hidden_act"  # the key of the mlp's
    rope_by_kind: bool = False  # layers with a window have another theta
    is_gpt2: bool = False
    packing: str = ""  # by which its matrices may be quantised


# --- windows --------------------------------------------------------------------------------------


def shortest(pattern: Sequence) -> list:
    """Returns the shortest list that gives the pattern when repeated.

    In one pass (Knuth, Morris and Pratt): `borders` has, for each beginning of the pattern, the
    length of the longest shorter beginning that also ends it.
    """
    borders = [0] * (len(pattern) + 1)
    for end in range(2, len(pattern) + 1):
        border = borders[end - 1]
        while border and pattern[end - 1] != pattern[border]:
            border = borders[border]
        borders[end] = border + (pattern[end - 1] == pattern[border])
    return list(pattern[: len(pattern) - borders[-1]])


def _windows(keys: Keys, has_window: Sequence[bool]) -> ModelSettings:
    """Returns `windows`: by `layer_types` if there is one, else by `has_window` of each layer."""
    window = keys.whole("sliding_window")
    layers = keys.count("num_hidden_layers")
    kinds = keys.take("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise keys.refused("layer_types", kinds, f"a list of {layers} kinds")
        for kind in kinds:
            if kind not in (FULL, WINDOW):
                raise ConfigError(
                    f"{keys.where}: {kind!r} in layer_types has no setting here",
                    fix=f"a model of {FULL} and {WINDOW}",
                )
        has_window = [kind == WINDOW for kind in kinds]
    if window is None or not any(has_window):
        return {}
    if window == 0:
        raise keys.refused("sliding_window", window, "at least 1")
    return {"windows": shortest([window if has else 0 for has in has_window])}


def _all_layers(keys: Keys) -> list[bool]:
    return [True] * keys.count("num_hidden_layers")


def _every(keys: Keys, pattern: int) -> list[bool]:
    """Gives every layer a window, except each `pattern`-th."""
    return [(number + 1) % pattern != 0 for number in range(keys.count("num_hidden_layers"))]


def _window_of(model: TransformerConfig) -> int | None:
    return max((kind.window for kind in model.layer_kinds), default=0) or None


def _layer_types(model: TransformerConfig) -> list[str]:
    return [WINDOW if kind.window else FULL for kind in model.layer_kinds]


# --- the keys of families -------------------------------------------------------------------------


def _biases(keys: Keys) -> ModelSettings:
    """Returns the settings for the biases of a model; Llama's default is none."""
    attention = keys.flag("attention_bias")
    biases = {"qkv_bias": attention, "out_bias": attention, "mlp_bias": keys.flag("mlp_bias")}
    return {name: True for name, has in biases.items() if has}


def _write_biases(model: TransformerConfig) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias}


def _write_llama(model: TransformerConfig) -> dict[str, Any]:
    return _write_biases(model) | {"mlp_bias": model.mlp_bias}


def _mistral(keys: Keys) -> ModelSettings:
    return _windows(keys, _all_layers(keys))


def _write_mistral(model: TransformerConfig) -> dict[str, Any]:
    return {"sliding_window": _window_of(model)}


def _qwen_windows(keys: Keys) -> ModelSettings:
    """Reads `sliding_window`, which counts only with `use_sliding_window`, from layer
    `max_window_layers` on.
    """
    first = keys.whole("max_window_layers") or 0
    return _if_used(keys, [number >= first for number in range(keys.count("num_hidden_layers"))])


def _if_used(keys: Keys, has_window: Sequence[bool]) -> ModelSettings:
    """Returns `windows` as `_windows` does, if `use_sliding_window` says that there are any."""
    windows = _windows(keys, has_window)
    return windows if keys.flag("use_sliding_window") else {}


def _qwen2(keys: Keys) -> ModelSettings:
    return {"qkv_bias": True} | _qwen_windows(keys)


def _qwen3(keys: Keys) -> ModelSettings:
    return _biases(keys) | _qwen_windows(keys)


def _write_qwen2(model: TransformerConfig) -> dict[str, Any]:
    kinds = _layer_types(model)
    return {
        "use_sliding_window": WINDOW in kinds,
        "sliding_window": _window_of(model),
        "max_window_layers": kinds.index(WINDOW) if WINDOW in kinds else len(kinds),
        "layer_types": kinds,
    }


def _write_qwen3(model: TransformerConfig) -> dict[str, Any]:
    return _write_qwen2(model) | _write_biases(model)


def _gemma(keys: Keys) -> ModelSettings:
    keys.pass_over("hidden_act")  # of older files; `hidden_activation` is what counts
    keys.must_be("use_bidirectional_attention", False, None)
    settings = _biases(keys) | {
        "score_scale": (keys.positive("query_pre_attn_scalar") or 1) ** -0.5
    }
    for ours, theirs in (
        ("score_cap", "attn_logit_softcapping"),
        ("logit_cap", "final_logit_softcapping"),
    ):
        cap = keys.positive(theirs)
        if cap is not None:
            settings[ours] = float(cap)
    return settings


def _gemma2(keys: Keys) -> ModelSettings:
    return _gemma(keys) | _windows(keys, _every(keys, 2))


def _gemma3(keys: Keys) -> ModelSettings:
    pattern = keys.some("sliding_window_pattern") or 6
    return _gemma(keys) | _windows(keys, _every(keys, pattern))


def _write_gemma(model: TransformerConfig) -> dict[str, Any]:
    scale = model.score_factor or model.head_dim**-0.5
    scalar = scale**-2
    near = round(scalar)
    return _write_biases(model) | {
        "query_pre_attn_scalar": near if near and near**-0.5 == scale else scalar,
        "attn_logit_softcapping": model.score_cap,
        "final_logit_softcapping": model.logit_cap,
        "sliding_window": _window_of(model) or 4096,
        "layer_types": _layer_types(model),
    }


def _write_gemma3(model: TransformerConfig) -> dict[str, Any]:
    kinds = _layer_types(model)
    pattern = shortest(kinds)
    if pattern and pattern[-1] == FULL:
        return _write_gemma(model) | {"sliding_window_pattern": len(pattern)}
    return _write_gemma(model)


def _phi3(keys: Keys) -> ModelSettings:
    return _biases(keys) | _windows(keys, _all_layers(keys))


def _write_phi3(model: TransformerConfig) -> dict[str, Any]:
    window = {"sliding_window": _window_of(model)}
    scaling = model.rope_scaling
    original = scaling.original_length if scaling else None
    if scaling is None or original is None:
        return window | {ORIGINAL: model.max_length}
    # Its class takes the factor from the lengths, whatever the longest sequence of the run.
    return window | {
        ORIGINAL: original,
        "max_position_embeddings": round(scaling.factor * original),
    }


def _olmo3(keys: Keys) -> ModelSettings:
    return _biases(keys) | _windows(keys, _every(keys, 4))


def _write_olmo3(model: TransformerConfig) -> dict[str, Any]:
    return _write_biases(model) | {
        "sliding_window": _window_of(model) or 4096,
        "layer_types": _layer_types(model),
    }


def _smollm3(keys: Keys) -> ModelSettings:
    """Reads `no_rope_layers`, which is 1 for a layer that HAS rotary positions."""
    layers = keys.count("num_hidden_layers")
    interval = keys.some("no_rope_layer_interval") or layers + 1
    listed = keys.take("no_rope_layers")
    turns = [(number + 1) % interval != 0 for number in range(layers)]
    if listed is not None:
        is_list = isinstance(listed, list) and len(listed) == layers
        if not is_list or any(flag not in (0, 1) for flag in listed):
            raise keys.refused("no_rope_layers", listed, f"a list of {layers} times 0 or 1")
        turns = [bool(flag) for flag in listed]
    keys.pass_over("max_window_layers")
    settings = _biases(keys) | _if_used(keys, [not turn for turn in turns])
    return settings if all(turns) else settings | {"rope_layers": shortest(turns)}


def _write_smollm3(model: TransformerConfig) -> dict[str, Any]:
    turns = [int(kind.rope_theta is not None) for kind in model.layer_kinds]
    return _write_llama(model) | _write_qwen2(model) | {"no_rope_layers": turns}


def _granite(keys: Keys) -> ModelSettings:
    return _biases(keys) | {
        "score_scale": float(keys.positive("attention_multiplier") or 1),
        "embed_scale": float(keys.positive("embedding_multiplier") or 1),
        "residual_scale": float(keys.positive("residual_multiplier") or 1),
        "logit_scale": 1 / (keys.positive("logits_scaling") or 1),
    }


def _write_granite(model: TransformerConfig) -> dict[str, Any]:
    return _write_llama(model) | {
        "attention_multiplier": model.score_factor or model.head_dim**-0.5,
        "embedding_multiplier": model.embed_factor,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": 1 / model.logit_factor,
    }


def _mixtral(keys: Keys) -> ModelSettings:
    experts = _experts(keys, "num_local_experts") | {
        "jitter": float(keys.number("router_jitter_noise") or 0)
    }
    return {"experts": experts} | _windows(keys, _all_layers(keys))


def _write_mixtral(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return _write_mistral(model) | {
        "intermediate_size": model.experts.ffn,
        "num_local_experts": model.experts.count,
        "num_experts_per_tok": model.experts.chosen,
        "router_jitter_noise": model.experts.jitter,
    }


def _experts(keys: Keys, count: str) -> dict[str, Any]:
    return {"count": keys.count(count), "chosen": keys.count("num_experts_per_tok")}


def _qwen3_moe(keys: Keys) -> ModelSettings:
    keys.must_be("decoder_sparse_step", 1)
    keys.must_be("mlp_only_layers", [], None)
    renamed = "num_local_experts" if "num_local_experts" in keys else "num_experts"
    experts = _experts(keys, renamed) | {
        "ffn": keys.count("moe_intermediate_size"),
        "normalise": keys.flag("norm_topk_prob"),
    }
    keys.pass_over("max_window_layers")
    return _biases(keys) | _if_used(keys, _all_layers(keys)) | {"experts": experts}


def _write_qwen3_moe(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return _write_qwen3(model) | {
        "num_experts": model.experts.count,
        "num_experts_per_tok": model.experts.chosen,
        "moe_intermediate_size": model.experts.ffn,
        "norm_topk_prob": model.experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(keys: Keys) -> ModelSettings:
    keys.take("quantization_config")  # read with the weights
    keys.take("initial_context_length")  # another key for the theta of the rotary positions
    keys.must_be("swiglu_limit", 7.0)
    keys.must_be("swiglu_alpha", 1.702)
    keys.pass_over("hidden_act")  # its class has one activation
    keys.whole("experts_per_token")  # another word for num_experts_per_tok
    keys.flag("attention_bias")
    experts = _experts(keys, "num_local_experts") | {"logit_bias": True}
    return _windows(keys, _every(keys, 2)) | {"experts": experts}


def _write_gpt_oss(model: TransformerConfig) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return {
        "intermediate_size": model.experts.ffn,
        "num_local_experts": model.experts.count,
        "num_experts_per_tok": model.experts.chosen,
        "sliding_window": _window_of(model) or 128,
        "layer_types": _layer_types(model),
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }


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
    experts = _experts(keys, "n_routed_experts") | {
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
        "score_scale": _latent_scale(keys, latent["plain_dim"] + latent["rope_dim"]),
    }


def _latent_scale(keys: Keys, width: int) -> float | None:
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
    written = write_rope(model, "deepseek_v3")
    for name in ("rope_scaling", "rope_parameters"):
        keys[name] = written[name] | {"mscale_all_dim": times}
    return keys


def _gpt2(keys: Keys) -> ModelSettings:
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("add_cross_attention", False)
    return {}


# --- the families ---------------------------------------------------------------------------------

GEMMA_LIKE = {"norm_places": "both", "norm_offset": 1.0, "embed_scale": "sqrt"}
OF_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
OF_GEMMA3 = OF_GEMMA | {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
OLMO_LIKE = {"norm_places": "after", "query_norm": "all"}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        read=_gpt2,
        activation="activation_function",
        is_gpt2=True,
    ),
    "llama": Family("LlamaForCausalLM", {"rms_norm_eps": 1e-6}, read=_biases, write=_write_llama),
    "mistral": Family(
        "MistralForCausalLM",
        {"rms_norm_eps": 1e-6, "sliding_window": 4096},
        read=_mistral,
        write=_write_mistral,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28},
        read=_qwen2,
        write=_write_qwen2,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "rms_norm_eps": 1e-6,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        {"query_norm": "head"},
        read=_qwen3,
        write=_write_qwen3,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        OF_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        GEMMA_LIKE,
        read=_gemma2,
        write=_write_gemma,
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        OF_GEMMA3,
        GEMMA_LIKE | {"query_norm": "head"},
        read=_gemma3,
        write=_write_gemma3,
        activation="hidden_activation",
        rope_by_kind=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        read=_phi3,
        write=_write_phi3,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        OLMO_LIKE,
        read=_biases,
        write=_write_biases,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        OLMO_LIKE,
        read=_olmo3,
        write=_write_olmo3,
        rope_by_kind=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "max_window_layers": 28,
        },
        read=_smollm3,
        write=_write_smollm3,
    ),
    "granite": Family(
        "GraniteForCausalLM", {"rms_norm_eps": 1e-6}, read=_granite, write=_write_granite
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
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
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        {
            "mlp": "swiglu_clamped",
            "sinks": True,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
        },
        read=_gpt_oss,
        write=_write_gpt_oss,
        packing="mxfp4",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        read=_mixtral,
        write=_write_mixtral,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"query_norm": "head"},
        read=_qwen3_moe,
        write=_write_qwen3_moe,
    ),
}


def read_positions(name: str, keys: Keys) -> ModelSettings:
    """Returns the settings of rotary positions in the family of this name."""
    return read_rope(keys, name, by_kind=FAMILIES[name].rope_by_kind)


def write_positions(name: str, model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of rotary positions in the family of this name, in both forms."""
    return write_rope(model, name, by_kind=FAMILIES[name].rope_by_kind)
