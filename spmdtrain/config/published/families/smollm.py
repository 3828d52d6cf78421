"""SmolLM3."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import shortest, windows_if_used
from spmdtrain.config.published.families.llama import write_llama
from spmdtrain.config.published.families.qwen import write_qwen2
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


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
    settings = read_biases(keys) | windows_if_used(keys, [not turn for turn in turns])
    return settings if all(turns) else settings | {"rope_layers": shortest(turns)}


def _write_smollm3(model: TransformerConfig) -> dict[str, Any]:
    turns = [int(kind.rope_theta is not None) for kind in model.layer_kinds]
    return write_llama(model) | write_qwen2(model) | {"no_rope_layers": turns}


SMOLLM = {
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        reads=(
            *WITH_SILU,
            "attention_bias",
            "layer_types",
            "mlp_bias",
            "no_rope_layer_interval",
            "no_rope_layers",
            "sliding_window",
            "use_sliding_window",
        ),
        defaults={
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "max_window_layers": 28,
        },
        read=_smollm3,
        write=_write_smollm3,
    ),
}
