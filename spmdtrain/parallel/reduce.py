"""Reduces gradients over mesh axes, once a step.

A reduction is one all-reduce or, if a gradient is sharded (ZeRO-1, fsdp), one reduce-scatter. It is
called after all microbatches, in the region that is manual over these axes, on the gradients that
each shard of the batch has accumulated.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.axes import BATCH_AXES, axes_of_dim

if TYPE_CHECKING:
    from spmdtrain.parallel.compress import Codec


@dataclass(frozen=True)
class Reduction:
    """The reduction of a gradient: an all-reduce over `sum`, a reduce-scatter over `scatter`.

    `scatter` pairs each axis with the dim that it leaves split, in the order of the scatters.
    `codec`: how the gradient crosses `data`; None: uncompressed. `within`: how many
    neighbours along `data` sum it in float32 first.
    """

    sum: tuple[str, ...] = ()
    scatter: tuple[tuple[str, int], ...] = ()
    codec: "Codec | None" = None
    within: int = 1


def scatter_dim(
    shape: Sequence[int], spec: P, sizes: Mapping[str, int], stacked: int = 0
) -> int | None:
    """Chooses the dim of a gradient that ZeRO-1 splits over `data`.

    It is the largest dim that divides and that no mesh axis splits yet. If none divides, it is the
    largest that only other axes of the batch split and that divides by `data` as well. The last
    resort is a dim that can be padded without being doubled; the first `stacked` dims, which count
    layers, cannot. None if no dim qualifies: then the gradient stays whole.
    `sizes`: of all mesh axes.
    """
    data = sizes["data"]
    parts = [axes_of_dim(part) for part in spec]
    parts += [()] * (len(shape) - len(parts))
    whole = [dim for dim, size in enumerate(shape) if not parts[dim] and size]
    even = [dim for dim in whole if shape[dim] % data == 0]
    shared = []
    for dim, axes in enumerate(parts):
        ways = data * math.prod(sizes[axis] for axis in axes)
        if axes and set(axes) <= set(BATCH_AXES) and shape[dim] and shape[dim] % ways == 0:
            shared.append(dim)
    padded = [dim for dim in whole if shape[dim] > data and dim >= stacked]
    return max(even or shared or padded, key=lambda dim: shape[dim], default=None)


def scattered_spec(spec: P, dim: int | None) -> P:
    """Returns `spec` with `data` as the minor axis of `dim`; None changes nothing."""
    if dim is None:
        return spec
    parts = [*spec, *[None] * (dim + 1 - len(spec))]
    axes = (*axes_of_dim(parts[dim]), "data")
    parts[dim] = axes if len(axes) > 1 else "data"
    return P(*parts)


def reduction(
    spec: P,
    axes: Sequence[str],
    owning: Collection[str] = (),
    codec: "Codec | None" = None,
    within: int = 1,
) -> Reduction:
    """Returns how a gradient whose spec at rest is `spec` is reduced over `axes`.

    Over an axis in `spec` it is scattered, over any other it is summed. An `owning` axis needs
    neither: each device along it already has the gradients of its own part, as a stage has those
    of its layers.

    A dim that several axes split is scattered in the order of the spec, major axis first, because
    each scatter hands out consecutive slices of what the previous one has left.
    """
    split = [(axis, dim) for dim, part in enumerate(spec) for axis in axes_of_dim(part)]
    named = [axis for axis, _ in split]
    return Reduction(
        sum=tuple(axis for axis in axes if axis not in named),
        scatter=tuple((axis, dim) for axis, dim in split if axis in axes and axis not in owning),
        codec=codec if "data" in axes else None,
        within=within if codec else 1,
    )


def psum_tree(tree, axes: Sequence[str]):
    """Sums every leaf over `axes`, each of which must have more than one device.

    (In a partly manual region XLA refuses a sum over a group of one.)
    """
    if not axes:
        return tree
    return jax.tree.map(lambda x: _psum(x, tuple(axes)), tree)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sums x over `axes`. The transpose is the same sum, as in any region with check_vma off.

    jax would derive that transpose itself, but with a conditional on the platform around the
    collective.
    """
    return _in_float32_on_cpu(lambda x: jax.lax.psum(x, axes), x)


_psum.defvjp(lambda x, axes: (_psum(x, axes), None), lambda axes, _, dx: (_psum(dx, axes),))


def _in_float32_on_cpu(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Runs a collective in float32 if x has 16 bits and the platform is CPU.

    In a region that is manual over only some axes, XLA's CPU compiler aborts the process at a
    16-bit sum (jax 0.10 and 0.12: "Invalid binary instruction opcode copy").
    """
    if x.dtype.itemsize != 2:
        return collective(x)

    def widened(x):
        return collective(x.astype(jnp.float32)).astype(x.dtype)

    return jax.lax.platform_dependent(x, cpu=widened, default=collective)


def scatter_sum(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Sums x over `axes`, leaving each device its slice of dim `dim`; the first axis is major."""
    scattered: Any = _scatter_sum(x, axes, dim)
    return scattered


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter_sum(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Computes `scatter_sum`. The transpose gathers; it is written out for `_psum`'s reason."""
    scatter = partial(jax.lax.psum_scatter, axis_name=axes, scatter_dimension=dim, tiled=True)
    return _in_float32_on_cpu(scatter, x)


def _gather_cotangent(axes: tuple[str, ...], dim: int, _, dx: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.all_gather(dx, axes, axis=dim, tiled=True),)


_scatter_sum.defvjp(lambda x, axes, dim: (_scatter_sum(x, axes, dim), None), _gather_cotangent)


def gather_whole(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns x whole along `dim`. The transpose sums in float32, and scatters.

    The transpose that jax derives would sum in the dtype of x.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    whole: Any = _gather_whole(x, axes, dim)
    return whole


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_whole(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True)


def _sum_cotangent(axes: tuple[str, ...], dim: int, _, dx: jax.Array) -> tuple[jax.Array]:
    return (scatter_sum(dx.astype(jnp.float32), axes, dim).astype(dx.dtype),)


_gather_whole.defvjp(lambda x, axes, dim: (_gather_whole(x, axes, dim), None), _sum_cotangent)


def reduce_gradients(
    gradients: Mapping[str, jax.Array],
    reductions: Mapping[str, Reduction],
    automatic: Mapping[str, P],
) -> dict[str, jax.Array]:
    """Reduces each gradient, by path, as `reductions` says.

    A scattered gradient comes back as this shard's slice of the sum.

    `automatic` says how the axes that the region leaves to XLA split each gradient. They are made
    manual here as well, because XLA would gather over them around a scatter. That is impossible if
    such an axis splits the very dim to be scattered: that gradient is not compressed either.
    """
    mixed = set()
    for path, reduction in reductions.items():
        if any(axes_of_dim(automatic[path][dim]) for _, dim in reduction.scatter):
            mixed.add(path)
    separate = {path: x for path, x in gradients.items() if path not in mixed}
    specs = {path: automatic[path] for path in separate}
    axes = {axis for spec in specs.values() for part in spec for axis in axes_of_dim(part)}

    reduce = partial(_reduce, reductions=reductions)
    if axes:
        region = jax.shard_map(
            reduce, axis_names=axes, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        reduced = region(separate)
    else:
        reduced = reduce(separate)
    wide = {path: replace(reductions[path], codec=None) for path in mixed}
    return reduced | _reduce({path: gradients[path] for path in mixed}, wide)


def _reduce(
    gradients: Mapping[str, jax.Array], reductions: Mapping[str, Reduction]
) -> dict[str, jax.Array]:
    """Scatters the gradients that are split at rest, then sums what remains to be summed.

    In this order, the sums run over slices, which are smaller.
    """
    slices = dict(gradients)
    paths_of_sum = defaultdict(list)
    compressed = []
    for path in gradients:
        how = reductions[path]
        for axis, dim in how.scatter:
            if how.codec and axis == "data":
                slices[path] = how.codec.scatter_sum(slices[path], axis, dim, how.within)
            else:
                slices[path] = scatter_sum(slices[path], (axis,), dim)
        wide = how.sum
        if how.codec and "data" in how.sum:
            compressed.append(path)
            wide = tuple(axis for axis in how.sum if axis != "data")
        paths_of_sum[wide].append(path)
    reduced = {}
    for axes, paths in paths_of_sum.items():
        reduced |= psum_tree({path: slices[path] for path in paths}, axes)
    for path in compressed:
        how = reductions[path]
        assert how.codec is not None, "it was chosen for its codec"
        reduced[path] = how.codec.sum(reduced[path], "data", how.within)
    return reduced
