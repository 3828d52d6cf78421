"""Phi-3 and Phi-4."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import all_layers, read_windows, window_of
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import ORIGINAL, SHARE
from spmdtrain.config.schema import TransformerConfig


def _phi3(keys: Keys) -> ModelSettings:
    return read_biases(keys) | read_windows(keys, all_layers(keys))


def _write_phi3(model: TransformerConfig) -> dict[str, Any]:
    window = {"sliding_window": window_of(model)}
    scaling = model.rope_scaling
    original = scaling.original_length if scaling else None
    if scaling is None or original is None:
        return window | {ORIGINAL: model.max_length}
    # Its class takes the factor from the lengths, whatever the longest sequence of the run.
    return window | {
        ORIGINAL: original,
        "max_position_embeddings": round(scaling.factor * original),
    }


PHI = {
    "phi3": Family(
        "Phi3ForCausalLM",
        reads=(*WITH_SILU, SHARE, "sliding_window"),
        defaults={"rms_norm_eps": 1e-5, ORIGINAL: 4096},
        read=_phi3,
        write=_write_phi3,
        rope_kinds=("longrope",),
        strict_scaling=("short_factor", "long_factor"),
    ),
}
