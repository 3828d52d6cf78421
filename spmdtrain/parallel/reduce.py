"""How gradients cross mesh axes: one sum per step, or one scatter where a gradient rests split (ZeRO-1, fsdp).

Called inside the manual region over these axes, after all microbatches, on gradients that each shard has summed on its
own.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Crossing:
    """Of one gradient: summed over the axes in `sum`, and over those in `scatter` left split along their dim."""

    sum: tuple[str, ...] = ()
    scatter: tuple[tuple[str, int], ...] = ()


def scatter_dim(shape: Sequence[int], spec: P, data: int) -> int | None:
    """The dim of a gradient that ZeRO-1 splits over `data` devices; None: too small or too odd, it stays whole.

    Dims that no mesh axis splits yet come first (largest first): scattering one that is split moves more data.
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


def crossing(spec: P, axes: Sequence[str]) -> Crossing:
    """How a gradient that will rest as `spec` says crosses `axes`. Over `pipeline` it either is split already, each
    stage having its own, or is summed.

    A dim that several axes split is scattered in the spec's order, major axis first: each scatter hands out
    consecutive slices of what the one before has left.
    """
    split = [(axis, dim) for dim, part in enumerate(spec) for axis in _axes(part)]
    named = [axis for axis, _ in split]
    return Crossing(
        sum=tuple(axis for axis in axes if axis not in named),
        scatter=tuple((axis, dim) for axis, dim in split if axis in axes and axis != "pipeline"),
    )


def summed(tree, axes: Sequence[str]):
    """Sums every leaf over `axes`, which have more than one device each: XLA refuses a group of one here."""
    return jax.tree.map(lambda x: _sum(x, tuple(axes)), tree) if axes else tree


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Its transpose is the same sum, as where shard_map does not check varying axes. Said here because jax would leave
    the choice of platform in the transpose as a conditional around the collective."""
    return _on_cpu_in_float32(lambda x: jax.lax.psum(x, axes), x)


_sum.defvjp(lambda x, axes: (_sum(x, axes), None), lambda axes, _, dx: (_sum(dx, axes),))


def _on_cpu_in_float32(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """XLA's CPU compiler aborts the process at a 16-bit sum in a region that is manual over some axes only (jax 0.10
    and 0.12: "Invalid binary instruction opcode copy")."""
    if x.dtype.itemsize != 2:
        return collective(x)
    wide = lambda x: collective(x.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
    return jax.lax.platform_dependent(x, cpu=wide, default=collective)


def reduced(
    gradients: Mapping[str, jax.Array], ways: Mapping[str, Crossing], automatic: Mapping[str, P]
) -> dict[str, jax.Array]:
    """Gradients after their crossings; scattered ones are this shard's slice of the sum.

    `automatic`: how the mesh axes that the region leaves to XLA split each gradient. They are made manual as well:
    around a scatter XLA would gather over them. Not where one of them splits the very dim that is scattered.
    """
    mixed = {path for path, way in ways.items() if any(_axes(automatic[path][dim]) for _, dim in way.scatter)}
    alone = {path: x for path, x in gradients.items() if path not in mixed}
    specs = {path: automatic[path] for path in alone}
    axes = {axis for spec in specs.values() for part in spec for axis in _axes(part)}
    cross = partial(_crossed, ways=ways)
    if axes:
        alone = jax.shard_map(cross, axis_names=axes, in_specs=(specs,), out_specs=specs, check_vma=False)(alone)
    else:
        alone = cross(alone)
    return alone | cross({path: gradients[path] for path in mixed})


def _crossed(gradients: Mapping[str, jax.Array], ways: Mapping[str, Crossing]) -> dict[str, jax.Array]:
    slices, groups = dict(gradients), defaultdict(list)
    for path in gradients:
        way = ways[path]
        for axis, dim in way.scatter:
            scatter = partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=dim, tiled=True)
            slices[path] = _on_cpu_in_float32(scatter, slices[path])
        groups[way.sum].append(path)
    whole = [summed({path: slices[path] for path in paths}, axes) for axes, paths in groups.items()]
    return {path: x for group in whole for path, x in group.items()}


def _axes(part) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,) if part else ()
