"""Gemma 2 and 3."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.family import USUAL, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_but_each,
    layer_types_of,
    read_windows,
    shortest,
    window_of,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import FULL, WINDOW_THETA
from spmdtrain.config.schema import TransformerConfig

READ_BY_GEMMA = (
    *USUAL,
    "attention_bias",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
)
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


def _gemma(keys: Keys) -> ModelSettings:
    keys.pass_over("hidden_act")  # of older files; `hidden_activation` is what counts
    keys.must_be("use_bidirectional_attention", False, None)
    settings = read_biases(keys) | {
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
    return _gemma(keys) | read_windows(keys, all_but_each(keys, 2))


def _gemma3(keys: Keys) -> ModelSettings:
    pattern = keys.some("sliding_window_pattern") or 6
    return _gemma(keys) | read_windows(keys, all_but_each(keys, pattern))


def _write_gemma(model: TransformerConfig) -> dict[str, Any]:
    scale = model.score_factor or model.head_dim**-0.5
    scalar = scale**-2
    near = round(scalar)
    return write_biases(model) | {
        "query_pre_attn_scalar": near if near and near**-0.5 == scale else scalar,
        "attn_logit_softcapping": model.score_cap,
        "final_logit_softcapping": model.logit_cap,
        "sliding_window": window_of(model) or 4096,
        "layer_types": layer_types_of(model),
    }


def _write_gemma3(model: TransformerConfig) -> dict[str, Any]:
    kinds = layer_types_of(model)
    pattern = shortest(kinds)
    if pattern and pattern[-1] == FULL:
        return _write_gemma(model) | {"sliding_window_pattern": len(pattern)}
    return _write_gemma(model)


GEMMA = {
    "gemma2": Family(
        "Gemma2ForCausalLM",
        reads=(*READ_BY_GEMMA, "attn_logit_softcapping"),
        defaults=OF_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        settings=GEMMA_LIKE,
        read=_gemma2,
        write=_write_gemma,
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        reads=(
            *READ_BY_GEMMA,
            WINDOW_THETA,
            "sliding_window_pattern",
            "use_bidirectional_attention",
        ),
        defaults=OF_GEMMA3,
        settings=GEMMA_LIKE | {"query_norm": "head"},
        read=_gemma3,
        write=_write_gemma3,
        activation="hidden_activation",
        rope_by_kind=True,
    ),
}
