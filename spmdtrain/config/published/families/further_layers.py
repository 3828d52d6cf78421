"""Reads and writes the key of the layers after the last, which predict further tokens."""

from pathlib import Path
from typing import Any

from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.tensor_names import names_in
from spmdtrain.config.schema import TransformerConfig


def read_further(keys: Keys) -> ModelSettings:
    """Returns the settings of the layers after the last."""
    further = keys.whole("num_nextn_predict_layers")
    return {"multi_token": {"depth": further} if further else None}


def write_further(model: TransformerConfig) -> dict[str, Any]:
    """Returns the key that `read_further` reads."""
    return {"num_nextn_predict_layers": model.multi_token.depth if model.multi_token else 0}


def without_missing(settings: ModelSettings, folder: Path) -> ModelSettings:
    """Leaves these layers out if config.json announces them, and the files of `folder` have none:
    so transformers saves every model whose class has the key.
    """
    if "multi_token" not in settings:
        return settings
    names = names_in(folder)
    first = f".layers.{settings['layers']}."
    if not names or any(first in name for name in names):
        return settings
    return {name: value for name, value in settings.items() if name != "multi_token"}
