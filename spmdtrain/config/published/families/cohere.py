"""Command R7B, Command A: attention and mlp side by side."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import (
    all_but_each,
    layer_types_of,
    read_windows,
    turning_with_a_window,
    window_of,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

PATTERN = "sliding_window_pattern"
# Keys of published files that no class reads. Other values are those of other models.
OF_COHERE2 = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
# The pattern once more. transformers writes a list of layers in place of the pattern, and keeps it.
PERIOD = "layer_switch"
WITHOUT_EFFECT = ("use_embedding_sharing", "use_parallel_embedding")


def _cohere2(keys: Keys) -> ModelSettings:
    """Reads windows. Only layers with one have rotary positions."""
    for name, value in OF_COHERE2.items():
        keys.agrees(name, value)
    keys.pass_over(*WITHOUT_EFFECT)
    pattern = keys.some(PATTERN) or 4
    if keys.values.get("layer_types") is None:
        keys.agrees(PERIOD, pattern)
    keys.pass_over(PERIOD)
    windows = turning_with_a_window(read_windows(keys, all_but_each(keys, pattern)))
    scale = float(keys.positive("logit_scale") or 1)
    return windows | read_biases(keys) | {"logit_scale": scale}


def _write_cohere2(model: TransformerConfig) -> dict[str, Any]:
    return write_biases(model) | {
        "layer_types": layer_types_of(model),
        "logit_scale": model.logit_factor,
        "sliding_window": window_of(model),
    }


COHERE = {
    "cohere2": Family(
        "Cohere2ForCausalLM",
        reads=(
            *(name for name in WITH_SILU if name != "rms_norm_eps"),
            "attention_bias",
            "layer_norm_eps",
            "layer_types",
            "logit_scale",
            "sliding_window",
            PATTERN,
        ),
        defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            PATTERN: 4,
        },
        settings={"norm": "layernorm", "norm_places": "parallel"},
        read=_cohere2,
        write=_write_cohere2,
        epsilon="layer_norm_eps",
    ),
}
