"""OLMo Hybrid: three layers with the gated delta rule to one with attention."""

from typing import Any

from spmdtrain.config.published.families.activations import SILU
from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.families.listed_kinds import listed_kinds
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import FULL
from spmdtrain.config.schema import DeltaConfig, TransformerConfig

LINEAR = "linear_attention"
MIXERS = {LINEAR: "delta", FULL: "attention"}
EPSILON = 1e-5  # of the gated norm, whatever rms_norm_eps says
OF_INITIAL = (
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)
SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
NEGATIVE = "linear_allow_neg_eigval"
NO_ROPE = {"rope_type": "default", "rope_theta": None}


def _olmo_hybrid(keys: Keys) -> ModelSettings:
    keys.pass_over(*OF_INITIAL)
    mixers = [MIXERS[kind] for kind in listed_kinds(keys, MIXERS) or _each_fourth_full(keys)]
    delta = _delta(keys)
    settings = read_biases(keys)
    if "delta" in mixers:
        settings |= {"mixers": shortest(mixers), "delta": delta}
    if not _has_rope(keys):
        settings["rope_layers"] = [False]
    return settings


def _each_fourth_full(keys: Keys) -> list[str]:
    layers = keys.count("num_hidden_layers")
    kinds = [LINEAR if (number + 1) % 4 else FULL for number in range(layers)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def _delta(keys: Keys) -> dict[str, Any]:
    heads = keys.count("num_attention_heads")
    key_heads = keys.some("linear_num_key_heads") or heads
    width = int(0.75 * keys.count("hidden_size") / key_heads)
    key_dim = keys.some("linear_key_head_dim") or width
    return {
        "key_heads": key_heads,
        "value_heads": keys.some("linear_num_value_heads") or heads,
        "key_dim": key_dim,
        "value_dim": keys.some("linear_value_head_dim") or 2 * key_dim,
        "taps": keys.count("linear_conv_kernel_dim"),
        "rate": 2 if keys.flag(NEGATIVE) else 1,
        "epsilon": EPSILON,
        "norm_places": "before",
    }


def _has_rope(keys: Keys) -> bool:
    """Returns False where the theta is null; an absent one is that of the class.

    transformers takes `rope_parameters = null` for an absent table.
    """
    tables = (keys.table("rope_scaling") or {}, keys.table("rope_parameters") or {})
    theta = keys.values.get("rope_theta", ...)
    for table in tables:
        theta = table.get("rope_theta", theta)
    return theta is not None


def _write_olmo_hybrid(model: TransformerConfig) -> dict[str, Any]:
    if model.delta is None:  # an OLMo 2 or 3, whose families write it
        return {}
    theirs = {ours: kind for kind, ours in MIXERS.items()}
    keys = write_biases(model) | _write_delta(model.delta)
    keys["layer_types"] = [theirs.get(mixer) for mixer in model.layer_mixers]
    if all(kind.rope_theta is None for kind in model.layer_kinds):
        keys |= {"rope_theta": None, "rope_scaling": None, "rope_parameters": NO_ROPE}
    return keys


def _write_delta(delta: DeltaConfig) -> dict[str, Any]:
    return {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
        NEGATIVE: delta.rate == 2,
    }


OLMO_HYBRID = {
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        reads=(
            *(key for key in WITH_SILU if key != "head_dim"),
            *("attention_bias", "layer_types", NEGATIVE),
            *SIZES,
        ),
        defaults={"rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, NEGATIVE: True},
        settings={"norm_places": "after", "query_norm": "all"},
        read=_olmo_hybrid,
        write=_write_olmo_hybrid,
        activations=SILU,
    ),
}
