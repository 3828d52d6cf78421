"""Reads and writes the keys of biases that several families share."""

from typing import Any

from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


def read_biases(keys: Keys) -> ModelSettings:
    """Returns the settings for the biases of a model; Llama's default is none."""
    attention = keys.flag("attention_bias")
    biases = {"qkv_bias": attention, "out_bias": attention, "mlp_bias": keys.flag("mlp_bias")}
    return {name: True for name, has in biases.items() if has}


def write_biases(model: TransformerConfig) -> dict[str, Any]:
    """Returns the key of the biases of attention."""
    return {"attention_bias": model.qkv_bias}
