"""Cuts PartitionSpecs down to some mesh axes.

A manual region names its manual axes in the specs of its arguments, and the others inside.
"""

from collections.abc import Callable, Collection

from jax.sharding import PartitionSpec as P


def keep_axes(axes: Collection[str], spec: P) -> P:
    """Returns `spec` with only those mesh axes that are in `axes`."""
    return P(*(_filter_axes(part, lambda axis: axis in axes) for part in spec))


def drop_axes(axes: Collection[str], spec: P) -> P:
    """Returns `spec` without the mesh axes in `axes`."""
    return P(*(_filter_axes(part, lambda axis: axis not in axes) for part in spec))


def axes_of_dim(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that split one dim of a spec, major axis first."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _filter_axes(
    part: str | tuple[str, ...] | None, keep: Callable[[str], bool]
) -> str | tuple[str, ...] | None:
    names = tuple(axis for axis in axes_of_dim(part) if keep(axis))
    if len(names) > 1:
        return names
    return names[0] if names else None
