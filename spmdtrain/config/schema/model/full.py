"""[model.full]: layers without a window, whose heads have a width and number of their own."""

from functools import lru_cache
from typing import Any

from pydantic import Field

from spmdtrain.config.schema.model.layer_kinds import LayerParts
from spmdtrain.config.settings import Count, Settings

SIZES = ("head_dim", "kv_heads")


class FullConfig(Settings):
    """The heads of attention in layers without a window, as in Gemma 4.

    The other settings of such layers are those of [model].
    """

    head_dim: Count | None = Field(
        default=None, description="channels of a head; default: model.head_dim"
    )
    kv_heads: Count | None = Field(
        default=None, description="key and value heads; default: model.kv_heads"
    )
    keys_are_values: bool = Field(
        default=False,
        description="values are the projected keys, before the norm and rotation of keys",
    )


@lru_cache(maxsize=1000)
def of_layer(model: Any, layer: LayerParts) -> Any:
    """Returns the settings of a model with [model.full] whose layers all have the attention of
    `layer`. Windows stay those of the layers' numbers.
    """
    full, windows = model.full, model.windows
    if layer.is_full:
        sizes = {name: getattr(full, name) or getattr(model, name) for name in SIZES}
        return model.model_copy(update={"windows": (), "rope_theta_window": None, **sizes})
    any_window = next(window for window in windows if window)
    all_windows = tuple(window or any_window for window in windows)
    return model.model_copy(update={"full": None, "windows": all_windows})
