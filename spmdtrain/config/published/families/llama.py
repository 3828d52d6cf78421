"""Llama."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family
from spmdtrain.config.schema import TransformerConfig


def write_llama(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of the biases of attention and mlp."""
    return write_biases(model) | {"mlp_bias": model.mlp_bias}


LLAMA = {
    "llama": Family(
        "LlamaForCausalLM",
        reads=(*WITH_SILU, "attention_bias", "mlp_bias"),
        defaults={"rms_norm_eps": 1e-6},
        read=read_biases,
        write=write_llama,
    ),
}
