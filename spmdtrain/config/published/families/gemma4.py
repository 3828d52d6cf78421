"""Gemma 4: heads of another width in layers without a window."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from spmdtrain.config.errors import ConfigError
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
from spmdtrain.config.published.rope_keys import FULL, PROPORTIONAL, SHARE, WINDOW
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.config.schema.model.layer_kinds import repeated

OVERRIDES, FULL_DIM, FULL_HEADS = (
    "per_layer_config",
    "global_head_dim",
    "num_global_key_value_heads",
)
SIZES = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}  # theirs and ours
READS = (
    *USUAL,
    *(OVERRIDES, FULL_DIM, FULL_HEADS, SHARE),
    *("attention_bias", "attention_k_eq_v", "final_logit_softcapping", "hidden_activation"),
    *("layer_types", "sliding_window", "use_bidirectional_attention", "num_kv_shared_layers"),
    "use_double_wide_mlp",
)
DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    FULL_DIM: 512,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
}
ROPE = {
    WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": PROPORTIONAL, SHARE: 0.25, "rope_theta": 1_000_000.0},
}
SETTINGS = {
    "norm_places": "both",
    "embed_scale": "sqrt",
    "query_norm": "head",
    "value_norm": True,
    "layer_scale": True,
    "score_scale": 1.0,
}
OF_TOKENS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
HAS_EXPERTS = "enable_moe_block"
OF_EXPERTS = {"num_experts": "count", "top_k_experts": "chosen", "moe_intermediate_size": "ffn"}
# A layer's mlp is the shared expert.
BESIDE_MLP = {"shared": 1, "own_norms": True, "learned_scale": True}


def _gemma4(keys: Keys) -> ModelSettings:
    """Returns the settings of a model; its last layer never has a window."""
    layers = keys.count("num_hidden_layers")
    keys.must_be("use_bidirectional_attention", None, "vision")  # of pictures
    shared = keys.whole("num_kv_shared_layers") or 0
    is_wide = keys.flag("use_double_wide_mlp") and shared > 0
    settings = read_biases(keys) | read_windows(keys, all_but_each(keys, 6))
    if "windows" in settings:
        windows = [*repeated(settings["windows"], layers)[:-1], 0]
        settings["windows"] = shortest(windows)
    if shared:
        ffn = 2 * keys.count("intermediate_size") if is_wide else None
        settings |= {"shared_keys": shared, "shared_ffn": ffn}
    cap = keys.positive("final_logit_softcapping")
    if cap is not None:
        settings["logit_cap"] = float(cap)
    windows = repeated(settings.get("windows", (0,)), layers)
    return settings | {"full": _full(keys, [not window for window in windows])}


def _full(keys: Keys, is_full: list[bool]) -> dict[str, Any]:
    """Returns [model.full]: by `per_layer_config`, or else by the keys of all full layers."""
    keys_are_values = keys.flag("attention_k_eq_v")
    dim, heads = keys.some(FULL_DIM), keys.some(FULL_HEADS)
    sizes = {"head_dim": dim} | ({"kv_heads": heads} if heads and keys_are_values else {})
    if (table := keys.table(OVERRIDES)) is not None:
        sizes = _overridden(keys, table, is_full)
    return sizes | {"keys_are_values": keys_are_values}


def _overridden(keys: Keys, table: Mapping[str, Any], is_full: list[bool]) -> dict[str, Any]:
    """Returns the sizes of full layers in a table by the number of the layer.

    Those of layers with a window are the model's, and full layers are alike. transformers writes
    numbers of two digits, "05", where there are more than ten layers.
    """
    by_number = {int(number): own for number, own in table.items() if number.isdecimal()}
    usual = {theirs: keys.some(theirs) for theirs in SIZES}
    of_layers = []
    for number in range(len(is_full)):
        own = by_number.get(number) or {}
        if not isinstance(own, dict) or own.keys() - SIZES.keys():
            raise keys.unknown(f"{OVERRIDES}.{number}", own)
        of_layers.append(usual | own)
    by_kind = {full: of_layers[is_full.index(full)] for full in set(is_full)}
    for number, (full, sizes) in enumerate(zip(is_full, of_layers, strict=True)):
        if sizes != by_kind[full] or (not full and sizes != usual):
            raise ConfigError(
                f"{keys.where}: layer {number} has heads unlike others of its kind",
                asked=f"{OVERRIDES}.{number}={by_number.get(number)!r:.60}",
                fix=f"a model whose {WINDOW} layers are alike, and whose {FULL} layers are",
            )
    own = Keys(by_kind[True], {}, f"{keys.where}: {OVERRIDES}")
    return {ours: own.count(theirs) for theirs, ours in SIZES.items()}


def _write_gemma4(model: TransformerConfig) -> dict[str, Any]:
    if not model.full_layers or model.full is None:
        return {}
    full = model.of_layer(model.layer_parts[model.full_layers[0]])
    sizes = {theirs: getattr(full, ours) for theirs, ours in SIZES.items()}
    return write_biases(model) | {
        "layer_types": layer_types_of(model),
        "sliding_window": window_of(model) or DEFAULTS["sliding_window"],
        "final_logit_softcapping": model.logit_cap,
        "attention_k_eq_v": model.full.keys_are_values,
        "num_kv_shared_layers": model.shared_keys,
        "use_double_wide_mlp": model.shared_ffn == 2 * _width(model),
        FULL_DIM: full.head_dim,
        FULL_HEADS: full.kv_heads if model.full.keys_are_values else None,
        OVERRIDES: {str(number): sizes for number in model.full_layers},
    }


def _width(model: TransformerConfig) -> int:
    """Returns the width of the mlp that all tokens of a layer go through."""
    return model.experts.shared_width if model.experts else model.ffn


def _text_part(keys: Keys) -> ModelSettings:
    settings = _gemma4(keys) | _experts(keys)
    dim, rows = (keys.whole(name) for name in OF_TOKENS)
    if dim:
        settings["token_layers"] = {"dim": dim, "vocab": rows}
    return settings


def _experts(keys: Keys) -> ModelSettings:
    """Returns [model.experts], if layers have them."""
    if not keys.flag(HAS_EXPERTS):
        keys.pass_over(*OF_EXPERTS)
        return {}
    sizes = {ours: keys.count(theirs) for theirs, ours in OF_EXPERTS.items()}
    return {"experts": sizes | BESIDE_MLP | {"shared_ffn": keys.count("intermediate_size")}}


def _write_text_part(model: TransformerConfig) -> dict[str, Any]:
    dim, rows = OF_TOKENS
    of_tokens = {dim: 0}
    if model.token_layers:
        of_tokens = {dim: model.token_layers.dim, rows: model.token_layers.vocab or model.vocab}
    of_experts: dict[str, Any] = {HAS_EXPERTS: model.experts is not None}
    if model.experts:
        of_experts |= {theirs: getattr(model.experts, ours) for theirs, ours in OF_EXPERTS.items()}
        of_experts["intermediate_size"] = _width(model)
    return _write_gemma4(model) | of_tokens | of_experts


_family = partial(
    Family,
    settings=SETTINGS,
    activation="hidden_activation",
    rope_by_kind=True,
    rope_in_tables=True,
    default_rope=ROPE,
    rope_kinds=(PROPORTIONAL, "linear"),
)
GEMMA4 = {
    "gemma4_text": _family(
        "Gemma4ForCausalLM",
        reads=(*READS, *OF_TOKENS, HAS_EXPERTS, *OF_EXPERTS),
        defaults=DEFAULTS | {OF_TOKENS[0]: 256, OF_TOKENS[1]: 262_144},
        read=_text_part,
        write=_write_text_part,
    ),
    # The model without encoders has no keys of experts and of embeddings of layers.
    "gemma4_unified_text": _family(
        "Gemma4UnifiedForCausalLM",
        reads=READS,
        defaults=DEFAULTS | {"sliding_window": 1024, "max_position_embeddings": 262_144},
        read=_gemma4,
        write=_write_gemma4,
    ),
}
