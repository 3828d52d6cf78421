"""Decides whether the layers of a stack run as one loop, or are written out one after another.

A loop compiles in the time of one layer. It copies what its backward pass needs into arrays of all
layers and out again, and sums gradients over `data` only after its end (docs/scan_layers.md).
"""

from collections.abc import Mapping

from pallas_kernels.gpus import is_nvidia
from spmdtrain.config.schema import RunConfig

# Each takes 0.7 s of compiling on one core: 48 of them half a minute.
WRITTEN_OUT = 48
# Axes that split no layer. What a layer gathers or sums over others has only been seen in loops.
WHOLE_LAYERS = {"data"}


def scans_layers(config: RunConfig, sizes: Mapping[str, int], device_kind: str) -> bool:
    """Returns True for a loop. `sizes` are those of the mesh axes, `device_kind` jax's name."""
    asked = config.train.scan_layers
    if asked != "auto":
        return asked
    splits_layers = any(size > 1 for axis, size in sizes.items() if axis not in WHOLE_LAYERS)
    is_offloaded = config.train.remat == "offload"  # XLA orders transfers by the loop's turns
    is_deep = config.model.layers > WRITTEN_OUT
    return splits_layers or is_offloaded or is_deep or not is_nvidia(device_kind)
