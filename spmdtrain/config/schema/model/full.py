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
    """Returns the settings of a model whose layers all have the attention of `layer`, and if it
    shares keys its mlp. Windows stay those of the layers' numbers.
    """
    changes: dict[str, Any] = {}
    if model.shared_keys:
        changes["shared_keys"] = model.layers if layer.shares_keys else 0
        if layer.shares_keys and model.shared_ffn:
            changes["ffn"] = model.shared_ffn
    if model.full and layer.is_full:
        sizes = {name: getattr(model.full, name) or getattr(model, name) for name in SIZES}
        changes |= {"windows": (), "rope_theta_window": None, **sizes}
    elif model.full:
        any_window = next(window for window in model.windows if window)
        all_windows = tuple(window or any_window for window in model.windows)
        changes |= {"full": None, "windows": all_windows}
    return model.model_copy(update=changes)
