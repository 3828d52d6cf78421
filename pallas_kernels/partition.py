"""Runs kernels on a mesh: where every axis is manual, on local values.

To XLA's partitioner a kernel is one opaque call, and it would gather all its inputs. A nested
`shard_map` over the axes that are still automatic avoids that, with or without a region around it
that is manual over others.
"""

from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def automatic_axes() -> frozenset[str]:
    """Returns mesh axes of several devices that XLA still partitions here; none without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    return frozenset(name for name, kind, size in axes if kind != AxisType.Manual and size > 1)


def locally(function: Callable, in_specs, out_specs) -> Callable:
    """Returns `function` on local values along the automatic axes that the specs name.

    Specs are those of `shard_map`. If they name no automatic axis this is `function` itself.

    An axis that no spec names stays automatic: along it all devices do the same with the same
    values. Along an axis that only other specs name an input is whole, and its gradient is summed
    over that axis, in the gradient's dtype. So pass weights in float32: XLA's CPU compiler aborts
    at a 16-bit sum inside a partly manual region (jax 0.10 and 0.12).
    """
    specs = jax.tree.leaves((in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, P))
    axes = automatic_axes() & axes_of(*specs)
    if not axes:
        return function
    region = jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
    )
    # Eagerly, shard_map alone runs only where all axes of the mesh are manual.
    return jax.jit(region)


def wholly_manual(function: Callable) -> Callable:
    """Returns `function` with every axis manual, inside a partly manual region; elsewhere itself.

    Its arguments and results must be whole along the axes that become manual here.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    rest = {name for name, kind in axes if kind != AxisType.Manual}
    if not rest or len(rest) == len(mesh.axis_names):
        return function
    region = jax.shard_map(function, in_specs=P(), out_specs=P(), axis_names=rest, check_vma=False)
    return jax.jit(region)


def refuse_checked_vma(op: str, *arrays: jax.Array | None) -> None:
    """Raises a ValueError inside a shard_map that tracks varying manual axes (check_vma).

    Kernels, and handwritten derivative rules, do not state over which axes their results vary.
    """
    for x in arrays:
        if x is not None and jax.typeof(x).manual_axis_type.varying:
            raise ValueError(f"{op}: needs jax.shard_map(..., check_vma=False) around it")


def axes_of(*specs: P) -> set[str]:
    """Returns the mesh axes that the specs name."""
    axes = set()
    for spec in specs:
        for dim in spec:  # None, an axis, or several
            if isinstance(dim, tuple):
                axes.update(dim)
            elif dim is not None:
                axes.add(dim)
    return axes
