"""Decides whether the layers of a stack run as one loop, or are written out one after another.

A loop compiles in the time of one layer. It copies what its backward pass needs into arrays of all
layers and out again, and sums gradients over `data` only after its end (docs/scan_layers.md).
"""

from collections.abc import Mapping
from typing import Literal

from pallas_kernels.gpus import is_nvidia
from spmdtrain.config.schema import RunConfig

CPU = "cpu"  # jax's `device_kind` of one
# Each takes 0.7 s of compiling on one core: 48 of them half a minute.
WRITTEN_OUT = 48
# XLA for CPUs holds a third more temporaries without a loop, as it does not order layers by memory.
WRITTEN_OUT_ON_CPU = 8
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
    # XLA orders the transfers of what is offloaded by the loop's turns.
    return offloads or layers > _most_written_out(sizes, device_kind)


def _most_written_out(sizes: Mapping[str, int], device_kind: str) -> int:
    """Returns the largest number of layers that are written out."""
    split = {axis for axis, size in sizes.items() if size > 1}
    if is_nvidia(device_kind):
        return WRITTEN_OUT if split <= WHOLE_LAYERS else 0
    return WRITTEN_OUT_ON_CPU if device_kind == CPU and not split else 0
