"""Kernels on a mesh: run where every axis is manual, on local values, so that XLA has nothing to gather around them.

A kernel is one opaque call to XLA's partitioner, which would gather all its inputs. A nested shard_map over the axes
that are still automatic works without a region around it and inside one that is manual over some axes.
"""

from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def automatic_axes() -> frozenset[str]:
    """The mesh axes of more than one device that XLA still splits by itself here; none without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    named = zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    return frozenset(name for name, kind, size in named if kind != AxisType.Manual and size > 1)


def locally(function: Callable, in_specs, out_specs) -> Callable:
    """`function` on local values along the automatic axes that its specs name; itself where they name none.

    Specs are shard_map's. Along an axis that no spec names all devices do the same with the same values, so it may stay
    automatic. Along one that only others name an input is whole, and its gradient is summed over it. That sum runs in
    the gradient's dtype: give weights in float32 (XLA's CPU compiler aborts at a 16-bit sum inside a partly manual
    region, jax 0.10 and 0.12).
    """
    specs = jax.tree.leaves((in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, P))
    axes = automatic_axes() & axes_of(*specs)
    if not axes:
        return function
    # jit: shard_map by itself runs eagerly only where all axes of the mesh are manual
    return jax.jit(
        jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )
    )


def wholly_manual(function: Callable) -> Callable:
    """Inside a region that is manual over some axes: `function` in one that is manual over the others too, with what
    is whole along them. Elsewhere `function` itself."""
    mesh = jax.sharding.get_abstract_mesh()
    rest = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    }
    if not rest or len(rest) == len(mesh.axis_names):
        return function
    return jax.jit(
        jax.shard_map(function, in_specs=P(), out_specs=P(), axis_names=rest, check_vma=False)
    )


def unchecked(op: str, *arrays: jax.Array | None) -> None:
    """A ValueError inside a shard_map that follows which values differ between devices: derivative rules written by
    hand, and kernels, do not say that of what they give."""
    if any(x is not None and jax.typeof(x).manual_axis_type.varying for x in arrays):
        raise ValueError(f"{op}: needs jax.shard_map(..., check_vma=False) around it")


def axes_of(*specs: P) -> set[str]:
    """The mesh axes that the specs name."""
    parts = [part for spec in specs for part in spec if part]
    return {axis for part in parts for axis in (part if isinstance(part, tuple) else (part,))}
