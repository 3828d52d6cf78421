"""OLMo 2 and 3."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_but_each,
    layer_types_of,
    read_windows,
    window_of,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

OLMO_LIKE = {"norm_places": "after", "query_norm": "all"}


def _olmo3(keys: Keys) -> ModelSettings:
    return read_biases(keys) | read_windows(keys, all_but_each(keys, 4))


def _write_olmo3(model: TransformerConfig) -> dict[str, Any]:
    return write_biases(model) | {
        "sliding_window": window_of(model) or 4096,
        "layer_types": layer_types_of(model),
    }


OLMO = {
    "olmo2": Family(
        "Olmo2ForCausalLM",
        reads=(*WITH_SILU, "attention_bias"),
        defaults={"rms_norm_eps": 1e-5},
        settings=OLMO_LIKE,
        read=read_biases,
        write=write_biases,
        rope_kinds=("linear",),
        strict_scaling=("factor",),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        reads=(*WITH_SILU, "attention_bias", "layer_types", "sliding_window"),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        settings=OLMO_LIKE,
        read=_olmo3,
        write=_write_olmo3,
        rope_by_kind=True,
    ),
}
