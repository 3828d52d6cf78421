"""Decides whether the layers of a stack run as one loop, or are written out one after another.

A loop compiles in the time of one layer. It copies what its backward pass needs into arrays of all
layers and out again, and sums gradients over `data` only after its end (docs/scan_layers.md).
"""

from collections.abc import Mapping
from typing import Literal

from pallas_kernels.gpus import is_nvidia
from spmdtrain.config.schema import RunConfig

# Each takes 0.7 s of compiling on one core: 48 of them half a minute.
WRITTEN_OUT = 48
# Axes that split no layer. What a layer gathers or sums over others has only been seen in loops.
WHOLE_LAYERS = {"data"}


def scans_layers(config: RunConfig, sizes: Mapping[str, int], device_kind: str) -> bool:
    """Returns True for a loop. `sizes` are those of the mesh axes, `device_kind` jax's name."""
    offloads = config.train.remat == "offload"
    return is_loop(config.train.scan_layers, config.model.layers, offloads, sizes, device_kind)


def is_loop(
    setting: bool | Literal["auto"],
    layers: int,
    offloads: bool,
    sizes: Mapping[str, int],
    device_kind: str,
) -> bool:
    """Returns what `scans_layers` does, given the settings on which it depends."""
    if setting != "auto":
        return setting
    splits_layers = any(size > 1 for axis, size in sizes.items() if axis not in WHOLE_LAYERS)
    # XLA orders the transfers of what is offloaded by the loop's turns.
    return splits_layers or offloads or layers > WRITTEN_OUT or not is_nvidia(device_kind)
