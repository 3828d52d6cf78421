"""Code World Model: Llama with windows."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    layer_types_of,
    read_windows,
    window_of,
)
from spmdtrain.config.published.families.llama import write_llama
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import ORIGINAL
from spmdtrain.config.schema import TransformerConfig

WINDOW, THETA = 8192, 1e6
USUAL_ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 8192,
}


def _cwm(keys: Keys) -> ModelSettings:
    """Reads windows. Without a list the first of four layers has none."""
    has_window = [number % 4 != 0 for number in range(keys.count("num_hidden_layers"))]
    return read_biases(keys) | read_windows(keys, has_window)


def _write_cwm(model: TransformerConfig) -> dict[str, Any]:
    return write_llama(model) | {
        "layer_types": layer_types_of(model),
        "sliding_window": window_of(model) or WINDOW,
    }


CWM = {
    "cwm": Family(
        "CwmForCausalLM",
        reads=(*WITH_SILU, "layer_types", "mlp_bias", "sliding_window"),
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": THETA,
            "sliding_window": WINDOW,
        },
        read=_cwm,
        write=_write_cwm,
        default_rope=USUAL_ROPE,
    ),
}
