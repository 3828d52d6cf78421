"""Loads parameters from outside, one layer at a time, onto the devices that hold them.

`read(path, layer, index)` returns a part of one layer of a parameter, in the model's own shape. At
any time a process reads only one layer's part of one shard, for any mesh, pipeline layout and
padding: no parameter is ever whole on the host, unless the host is its device.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.host import empty
from spmdtrain.train.setup import Setup

Index = tuple[slice, ...]
# (path, number of the layer, or None for a parameter outside the stack, index) -> that part
ReadPart = Callable[[str, int | None, Index], np.ndarray]
Bounds = tuple[tuple[int, int], ...]  # start and stop of each dim
Place = tuple[int, ...]  # of a layer, in the leading dims of a part of a stack
LayerOf = Callable[
    [Bounds, Place], np.ndarray
]  # the layer at a place of the part with these bounds


def layer_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by path, or that of one layer if it is a stack.

    Adapters are left out: they are not part of a model that comes from outside.
    """
    return {
        path: parameter.shape[_stack_dims(setup, path) :]
        for path, parameter in setup.model.parameters.items()
        if not parameter.is_of_adapter
    }


def params_from_layers(setup: Setup, read: ReadPart) -> dict[str, jax.Array]:
    """Returns the parameters at rest, except adapters, in the shards and dtypes of `setup`.

    `read` is called for the paths of `layer_shapes`, and returns parts of these shapes.
    """
    return {path: _parameter(setup, path, partial(read, path)) for path in layer_shapes(setup)}


def _stack_dims(setup: Setup, path: str) -> int:
    return len(setup.model.stage_layout.shape) if setup.model.in_stack(path) else 0


def _parameter(
    setup: Setup, path: str, read: Callable[[int | None, Index], np.ndarray]
) -> jax.Array:
    leaf = setup.state.params[path]
    stacked = _stack_dims(setup, path)
    unpadded = setup.padding.of_model[path][stacked:]

    def layer_of(bounds: Bounds, place: Place) -> np.ndarray:
        layer = _layer_at(setup, bounds[:stacked], place)
        return _padded(bounds[stacked:], unpadded, partial(read, layer))

    if all(device.platform == "cpu" for device in leaf.sharding.addressable_devices):
        return _filled(leaf, stacked, layer_of)
    return _sent(leaf, stacked, layer_of)


def _filled(leaf: jax.Array, stacked: int, layer_of: LayerOf) -> jax.Array:
    """Returns a parameter on CPU devices, filled in place without a copy."""
    local = leaf.sharding.shard_shape(leaf.shape)
    arrays = []
    for bounds, devices in _parts(leaf).items():
        part = empty(local, leaf.dtype)
        for place in np.ndindex(*local[:stacked]):
            part[place] = layer_of(bounds, place)
        arrays += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _sent(leaf: jax.Array, stacked: int, layer_of: LayerOf) -> jax.Array:
    """Returns a parameter that is sent to its devices one layer at a time."""
    parts = _parts(leaf)
    local = leaf.sharding.shard_shape(leaf.shape)
    places = list(np.ndindex(*local[:stacked]))

    def slab(place: Place) -> jax.Array:
        """Returns the layers at this place of every part of the stack, as one sharded array."""
        arrays = []
        for bounds, devices in parts.items():
            layer = layer_of(bounds, place)
            layer = layer.reshape((1,) * stacked + layer.shape)
            arrays += [jax.device_put(layer, device) for device in devices]
        many = (whole // one for whole, one in zip(leaf.shape, local, strict=True))
        shape = (*itertools.islice(many, stacked), *leaf.shape[stacked:])
        made = jax.make_array_from_single_device_arrays(shape, leaf.sharding, arrays)
        return jax.block_until_ready(made)

    if len(places) == 1:
        only = slab(places[0])
        same = only.dtype == leaf.dtype
        return only if same else jax.jit(lambda x: x.astype(leaf.dtype))(only)
    whole = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
    for place in places:
        at = jnp.array((*place, *[0] * (len(leaf.shape) - stacked)), jnp.int32)
        whole = jax.block_until_ready(_put(whole, slab(place), at, leaf.sharding))
    return whole


def _parts(leaf: jax.Array) -> dict[Bounds, list[jax.Device]]:
    """Returns the distinct parts of a parameter that this process holds, with their devices."""
    parts: dict[Bounds, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None, "the device is one of this process"
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index, leaf.shape, strict=True))
        parts.setdefault(bounds, []).append(device)
    return parts


def _layer_at(setup: Setup, bounds: Bounds, place: Place) -> int | None:
    """Returns the number of the layer at a place of a part of the stack.

    Padding repeats the last layer.
    """
    if not bounds:
        return None
    layout = setup.model.stage_layout
    at = tuple(start + inside for (start, _), inside in zip(bounds, place, strict=True))
    return min(int(np.ravel_multi_index(at, layout.shape)), layout.layers - 1)


def _padded(
    bounds: Bounds, unpadded: Sequence[int], read: Callable[[Index], np.ndarray]
) -> np.ndarray:
    """Returns a part of one layer, with zeros beyond the model's own shape."""
    inside = [
        (min(start, size), min(stop, size)) for (start, stop), size in _with(bounds, unpadded)
    ]
    part = np.ascontiguousarray(read(tuple(slice(start, stop) for start, stop in inside)))
    more = [(0, stop - start - has) for (start, stop), has in _with(bounds, part.shape)]
    return np.pad(part, more) if any(after for _, after in more) else part


def _with(bounds: Bounds, sizes: Sequence[int]) -> list[tuple[tuple[int, int], int]]:
    return list(zip(bounds, sizes, strict=True))


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _put(
    whole: jax.Array, slab: jax.Array, at: jax.Array, sharding: jax.sharding.NamedSharding
) -> jax.Array:
    """Returns `whole` with a layer put into each part of a stack, on the device that holds it."""

    def put(part: jax.Array, layer: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(part, layer.astype(part.dtype), tuple(at))

    specs = (sharding.spec, sharding.spec, P())
    local = jax.shard_map(put, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)
    return local(whole, slab, at)
