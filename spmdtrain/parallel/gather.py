"""Gathers weights that are sharded over the axes of the batch.

This is FSDP (arXiv:2304.11277), or ZeRO-3 (arXiv:1910.02054): every device keeps a part of a
weight, which is gathered just before a layer uses it, and its gradient is scattered just after.
Both are written explicitly, in a region that is manual over the axes of the batch. So XLA never
gathers the batch instead, and a gradient crosses the network in the precision that the settings
choose.

Weights are gathered in one of these ways:

    unit            by                                when
    array           `gather_over`                     inside the region: ZeRO-1, once a step
    weight          `GatherWeight`                    inside the region, with its gradient
    layer           `ctx.gather_layer`                before a layer runs: by `GatherWeight` in
                                                      training, by a constraint while sampling
    all weights     `grad_pipeline._whole_over_batch` before a pipeline, by constraints: its layers
                                                      would gather at each tick
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import automatic_axes, axes_of
from spmdtrain.parallel.axes import BATCH_AXES, axes_of_dim, drop_axes, owning_axes
from spmdtrain.parallel.reduce import scatter_sum
from spmdtrain.parallel.regions import MANUAL_AXES

# The axes of the batch over which layers gather their weights. `data` is not among them: ZeRO-1
# gathers over it once a step, before the first microbatch.
LAYER_AXES = tuple(axis for axis in BATCH_AXES if axis != "data")


@dataclass(frozen=True)
class GatherWeight:
    """The all-gather of one weight before a layer uses it; its gradient is reduce-scattered.

    spec: the weight's spec at rest, one entry per dim.
    axes: the mesh axes to gather over, as `gathered_axes` gives them.
    resting: the dtype of the weight at rest, and of its gradient.
    compute: the dtype in which it crosses the network and is used.
    accumulate: the dtype in which its gradient is summed over the devices.
    of_experts: its first dim counts experts.
    """

    spec: P
    axes: tuple[str, ...]
    resting: str
    compute: str
    accumulate: str
    of_experts: bool = False

    def __call__(self, weight: jax.Array) -> jax.Array:
        """Returns the whole weight in `compute`, from this device's part of it in `resting`."""
        return _gather(weight, self)


def gathered_axes(spec: P, names: Iterable[str | None]) -> tuple[str, ...]:
    """Returns the axes over which a layer gathers a weight whose spec at rest is `spec`.

    `names` are its logical axes: nothing is gathered over a mesh axis that owns its part.
    """
    left_out = owning_axes(names)
    split = [axis for part in spec for axis in axes_of_dim(part)]
    return tuple(axis for axis in split if axis in LAYER_AXES and axis not in left_out)


def gather_over(
    axes: Collection[str], spec: P, x: jax.Array, *, of_experts: bool = False
) -> jax.Array:
    """Returns x, whose spec is `spec`, gathered over those of the manual `axes` that split it.

    `of_experts`: its first dim counts experts. XLA keeps the dim of a collective outermost in
    memory, and would hold a copy of the experts of all layers in that order, in float32. So the
    parts are gathered one after another, and then put in place.
    """
    split = _split_dims(axes, spec)

    def gather(x: jax.Array) -> jax.Array:
        for dim, names in split:
            if not _is_inside(dim, x, of_experts):
                x = jax.lax.all_gather(x, names, axis=dim, tiled=True)
                continue
            parts = jax.lax.all_gather(x, names, axis=0, tiled=True)
            parts = parts.reshape(-1, *x.shape)
            x = jnp.moveaxis(parts, 0, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
        return x

    return _beside_automatic_axes(gather, spec, split, x)


def scatter_over(
    axes: Collection[str], spec: P, x: jax.Array, *, of_experts: bool = False
) -> jax.Array:
    """Returns this device's part of x summed over the devices; the sum's spec is `spec`.

    `of_experts`: as in `gather_over`.
    """
    split = _split_dims(axes, spec)

    def scatter(x: jax.Array) -> jax.Array:
        for dim, names in split:
            if not _is_inside(dim, x, of_experts):
                x = scatter_sum(x, names, dim)
                continue
            ways = jax.lax.axis_size(names)
            shape = (*x.shape[:dim], x.shape[dim] // ways, *x.shape[dim + 1 :])
            parts = x.reshape(*x.shape[:dim], ways, -1, *x.shape[dim + 1 :])
            parts = jnp.moveaxis(parts, dim, 0).reshape(-1, *shape[1:])
            x = scatter_sum(parts, names, 0)
        return x

    spread = _spread(spec, x.shape)
    summed = _beside_automatic_axes(scatter, spread, split, x)
    if spread == spec:
        return summed
    return jax.lax.with_sharding_constraint(summed, drop_axes(MANUAL_AXES, spec))


def _is_inside(dim: int, x: jax.Array, of_experts: bool) -> bool:
    """Returns True if `dim` is inside the dim that counts several experts."""
    return of_experts and dim > 0 and x.shape[0] > 1


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(weight: jax.Array, how: GatherWeight) -> jax.Array:
    part = weight.astype(how.compute)
    return gather_over(how.axes, how.spec, part, of_experts=how.of_experts)


def _gather_forward(weight: jax.Array, how: GatherWeight) -> tuple[jax.Array, None]:
    return _gather(weight, how), None


def _gather_backward(how: GatherWeight, _, gradient: jax.Array) -> tuple[jax.Array]:
    wide = gradient.astype(how.accumulate)
    summed = scatter_over(how.axes, how.spec, wide, of_experts=how.of_experts)
    return (summed.astype(how.resting),)


_gather.defvjp(_gather_forward, _gather_backward)


def _spread(spec: P, shape: Sequence[int]) -> P:
    """Lets the automatic axes that `spec` leaves out (`context`) split the largest whole dim.

    Each device along these axes has a part of the sum, because it has worked on other tokens. XLA
    would sum all of x before the scatter. With this constraint it sums with a reduce-scatter, and
    only the small slices that the scatter leaves are gathered again.
    """
    mesh = jax.sharding.get_abstract_mesh()
    unused = tuple(sorted(automatic_axes() - axes_of(spec)))
    ways = math.prod(mesh.shape[axis] for axis in unused)
    whole = [dim for dim, part in enumerate(spec) if part is None and shape[dim] % ways == 0]
    if not unused or not whole:
        return spec
    parts = list(spec)
    parts[max(whole, key=lambda dim: shape[dim])] = unused
    return P(*parts)


def _split_dims(axes: Collection[str], spec: P) -> list[tuple[int, tuple[str, ...]]]:
    """Returns every dim that `axes` split, with the axes that split it, major first."""
    dims = []
    for dim, part in enumerate(spec):
        names = tuple(axis for axis in axes_of_dim(part) if axis in axes)
        if names:
            dims.append((dim, names))
    return dims


def _beside_automatic_axes(
    collective: Callable[[jax.Array], jax.Array],
    spec: P,
    split: Sequence[tuple[int, tuple[str, ...]]],
    x: jax.Array,
) -> jax.Array:
    """Runs `collective(x)` when mesh axes that the region leaves to XLA may split x too.

    XLA would gather x over those axes around the collective. A nested region that is manual over
    them prevents that, unless one of them splits the same dim as the collective: the parts would
    then come back in another order.
    """
    automatic = drop_axes(MANUAL_AXES, spec)
    axes = {axis for part in automatic for axis in axes_of_dim(part)}
    if not axes:
        return collective(x)
    if any(automatic[dim] is not None for dim, _ in split):
        return jax.lax.with_sharding_constraint(collective(x), automatic)
    region = jax.shard_map(
        collective,
        axis_names=axes,
        in_specs=automatic,
        out_specs=automatic,
        check_vma=False,
    )
    return region(x)
