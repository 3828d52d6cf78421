"""Parameters that come from outside, a layer at a time, brought to the devices where they rest.

`read(path, layer, index)` gives a part of one layer of a parameter, in the model's own shape. No
parameter is ever whole on the host: what a process reads at once is one layer's part of one shard,
whatever mesh, pipeline layout or padding the parameters rest in.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.train.setup import Setup

Index = tuple[slice, ...]
# (path, number of the layer, or None of a parameter outside the stack, index) -> that part
ReadPart = Callable[[str, int | None, Index], np.ndarray]
Bounds = tuple[tuple[int, int], ...]  # start and stop of each dim


def layer_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by path: of one layer, where it has several."""
    model = setup.model
    return {
        path: parameter.shape[_stack_dims(setup, path) :]
        for path, parameter in model.parameters.items()
    }


def params_from_layers(setup: Setup, read: ReadPart) -> dict[str, jax.Array]:
    """Returns the parameters at rest, in the shards and the dtype of `setup`."""
    return {path: _parameter(setup, path, partial(read, path)) for path in setup.state.params}


def _stack_dims(setup: Setup, path: str) -> int:
    return len(setup.model.layout.shape) if setup.model.in_stack(path) else 0


def _parameter(
    setup: Setup, path: str, read: Callable[[int | None, Index], np.ndarray]
) -> jax.Array:
    leaf = setup.state.params[path]
    stacked = _stack_dims(setup, path)
    unpadded = setup.padding.of_model[path][stacked:]
    by_index: dict[Bounds, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True))
        by_index.setdefault(bounds, []).append(device)
    parts = []
    for bounds, devices in by_index.items():
        layers = _layers(setup, bounds[:stacked])
        parts += _on_devices(bounds, unpadded, layers, leaf.dtype, devices, read)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _layers(setup: Setup, bounds: Bounds) -> list[tuple[tuple[int, ...], int | None]]:
    """Returns the places of a part's layers, from its first, and which layer each holds."""
    if not bounds:
        return [((), None)]
    layout = setup.model.layout
    found = []
    for place in itertools.product(*(range(start, stop) for start, stop in bounds)):
        number = int(np.ravel_multi_index(place, layout.shape))
        inside = tuple(at - start for at, (start, _) in zip(place, bounds, strict=True))
        found.append((inside, min(number, layout.layers - 1)))  # padding repeats the last layer
    return found


def _on_devices(
    bounds: Bounds,
    unpadded: Sequence[int],
    layers: Sequence[tuple[tuple[int, ...], int | None]],
    dtype: np.dtype,
    devices: Sequence[jax.Device],
    read: Callable[[int | None, Index], np.ndarray],
) -> list[jax.Array]:
    """Returns one part on each of its devices, filled a layer at a time."""
    shape = tuple(stop - start for start, stop in bounds)
    inner = bounds[len(bounds) - len(unpadded) :]
    there = tuple(
        (start, min(stop, size)) for (start, stop), size in zip(inner, unpadded, strict=True)
    )
    made = [jnp.zeros(shape, dtype, device=device) for device in devices]
    if any(start >= stop for start, stop in there):
        return made  # padding alone
    index = tuple(slice(start, stop) for start, stop in there)
    for place, layer in layers:
        part = np.ascontiguousarray(read(layer, index))
        at = np.array((*place, *[0] * len(unpadded)), np.int32)
        made = [
            _put(whole, jax.device_put(part, device), at)
            for whole, device in zip(made, devices, strict=True)
        ]
        jax.block_until_ready(made)  # so that one part at a time is on the host
    return made


@partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
    """Puts one layer into a part: it becomes as wide as that, and keeps the zeros of padding."""
    one = part.astype(whole.dtype).reshape((1,) * (whole.ndim - part.ndim) + part.shape)
    return jax.lax.dynamic_update_slice(whole, one, tuple(at))
