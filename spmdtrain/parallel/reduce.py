"""Reducing gradients over mesh axes: one all-reduce a step, or one reduce-scatter where a gradient rests split (ZeRO-1,
fsdp).

Called inside the region that is manual over these axes, after all microbatches, on the gradients that each shard has
accumulated on its own.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.specs import axes_of_dim


@dataclass(frozen=True)
class Reduction:
    """How a gradient is reduced: all-reduce over the axes in `sum`, reduce-scatter over those in `scatter`.

    `scatter` pairs each axis with the dim that it leaves split, in the order in which they are to run.
    """

    sum: tuple[str, ...] = ()
    scatter: tuple[tuple[str, int], ...] = ()


def scatter_dim(shape: Sequence[int], spec: P, data: int) -> int | None:
    """The dim of a gradient that ZeRO-1 splits over `data` devices; None: no dim divides, it stays whole.

    The largest dim that no mesh axis splits yet: scattering one that is split would move more data.
    """
    parts = [*spec, *[None] * (len(shape) - len(spec))]
    whole = [dim for dim, size in enumerate(shape) if parts[dim] is None and size % data == 0 and size]
    return max(whole, key=lambda dim: shape[dim], default=None)


def scattered_spec(spec: P, dim: int | None) -> P:
    """`spec` with `data` splitting `dim` as well."""
    if dim is None:
        return spec
    parts = [*spec, *[None] * (dim + 1 - len(spec))]
    parts[dim] = "data"
    return P(*parts)


def reduction(spec: P, axes: Sequence[str]) -> Reduction:
    """How a gradient that will rest as `spec` says is reduced over `axes`.

    Over `pipeline` it is split already, each stage having its own, or else summed.

    A dim that several axes split is scattered in the spec's order, major axis first: each scatter hands out
    consecutive slices of what the one before has left.
    """
    split = [(axis, dim) for dim, part in enumerate(spec) for axis in axes_of_dim(part)]
    named = [axis for axis, _ in split]
    return Reduction(
        sum=tuple(axis for axis in axes if axis not in named),
        scatter=tuple((axis, dim) for axis, dim in split if axis in axes and axis != "pipeline"),
    )


def psum_tree(tree, axes: Sequence[str]):
    """Every leaf summed over `axes`, each of which has more than one device: XLA refuses a group of one here."""
    if not axes:
        return tree
    return jax.tree.map(lambda x: _psum(x, tuple(axes)), tree)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The transpose of this sum is the same sum, as where shard_map does not check varying axes.

    Said by hand, because jax would leave the choice of platform in the transpose as a conditional around the
    collective.
    """
    return _in_float32_on_cpu(lambda x: jax.lax.psum(x, axes), x)


_psum.defvjp(lambda x, axes: (_psum(x, axes), None), lambda axes, _, dx: (_psum(dx, axes),))


def _in_float32_on_cpu(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """XLA's CPU compiler aborts the process at a 16-bit sum in a region that is manual over some axes only (jax 0.10
    and 0.12: "Invalid binary instruction opcode copy")."""
    if x.dtype.itemsize != 2:
        return collective(x)
    wide = lambda x: collective(x.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
    return jax.lax.platform_dependent(x, cpu=wide, default=collective)


def reduce_gradients(
    gradients: Mapping[str, jax.Array], reductions: Mapping[str, Reduction], automatic: Mapping[str, P]
) -> dict[str, jax.Array]:
    """Reduced gradients; a scattered one is this shard's slice of the sum.

    `automatic`: how the mesh axes that the region leaves to XLA split each gradient. Those axes are made manual here
    as well, since around a scatter XLA would gather over them; but not where one of them splits the very dim that is
    scattered.
    """
    mixed = {
        path
        for path, reduction in reductions.items()
        if any(axes_of_dim(automatic[path][dim]) for _, dim in reduction.scatter)
    }
    alone = {path: x for path, x in gradients.items() if path not in mixed}
    specs = {path: automatic[path] for path in alone}
    axes = {axis for spec in specs.values() for part in spec for axis in axes_of_dim(part)}
    reduce = partial(_reduce, reductions=reductions)
    if axes:
        alone = jax.shard_map(reduce, axis_names=axes, in_specs=(specs,), out_specs=specs, check_vma=False)(alone)
    else:
        alone = reduce(alone)
    return alone | reduce({path: gradients[path] for path in mixed})


def _reduce(gradients: Mapping[str, jax.Array], reductions: Mapping[str, Reduction]) -> dict[str, jax.Array]:
    slices = dict(gradients)
    by_axes = defaultdict(list)
    for path in gradients:
        for axis, dim in reductions[path].scatter:
            scatter = partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=dim, tiled=True)
            slices[path] = _in_float32_on_cpu(scatter, slices[path])
        by_axes[reductions[path].sum].append(path)
    whole = [psum_tree({path: slices[path] for path in paths}, axes) for axes, paths in by_axes.items()]
    return {path: x for group in whole for path, x in group.items()}
