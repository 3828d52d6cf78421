"""Reads and writes the key of the layers after the last, which predict further tokens."""

from collections.abc import Collection
from typing import Any

from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


def read_further(keys: Keys) -> ModelSettings:
    """Returns the settings of the layers after the last."""
    further = keys.whole("num_nextn_predict_layers")
    return {"multi_token": {"depth": further} if further else None}


def write_further(model: TransformerConfig) -> dict[str, Any]:
    """Returns the key that `read_further` reads."""
    return {"num_nextn_predict_layers": model.multi_token.depth if model.multi_token else 0}


def without_missing(settings: ModelSettings, names: Collection[str]) -> ModelSettings:
    """Leaves these layers out if config.json announces them, and files with tensors of these names
    have none: so transformers saves every model whose class has the key.
    """
    first = f".layers.{settings['layers']}."
    if not names or any(first in name for name in names):
        return settings
    return {name: value for name, value in settings.items() if name != "multi_token"}
