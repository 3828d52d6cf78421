"""PartitionSpecs cut down to some mesh axes: a manual region names its own in its specs, and the rest outside."""

from collections.abc import Callable, Collection

from jax.sharding import PartitionSpec as P


def keep_axes(axes: Collection[str], spec: P) -> P:
    """`spec` with the mesh axes in `axes` alone."""
    return P(*(_filtered(part, lambda axis: axis in axes) for part in spec))


def drop_axes(axes: Collection[str], spec: P) -> P:
    """`spec` without the mesh axes in `axes`."""
    return P(*(_filtered(part, lambda axis: axis not in axes) for part in spec))


def axes_of_dim(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split one dim of a spec, major axis first."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _filtered(part, keep: Callable[[str], bool]):
    names = tuple(axis for axis in axes_of_dim(part) if keep(axis))
    if len(names) > 1:
        return names
    return names[0] if names else None
