"""Converts leaves of a checkpoint to another pipeline layout, other padding or another width.

The first two depend on the mesh, which may change when a run resumes; the width is
`precision.params`. A leaf is first read as it was saved, then converted on the devices.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.axes import axes_of_dim
from spmdtrain.parallel.padding import Shape, add_zeros
from spmdtrain.pipeline.stage_layout import StageLayout
from spmdtrain.train.setup import Setup


def without_padding(setup: Setup, path: str, shape: Shape) -> Shape:
    """Returns the shape of a leaf of the parameter at `path` without its zero padding.

    A leaf of the optimizer has no padding if its shape differs from the parameter's.
    """
    padding = setup.padding
    return padding.of_model[path] if shape == padding.at_rest[path] else shape


def in_layout(setup: Setup, path: str, shape: Shape, layout: StageLayout) -> Shape:
    """Returns the shape of a leaf if the stack of layers is laid out as `layout`."""
    if not setup.model.in_stack(path):
        return shape
    return layout.shape + shape[len(setup.model.stage_layout.shape) :]


def as_saved(
    setup: Setup, path: str, leaf: jax.ShapeDtypeStruct, shape: Shape, layout: StageLayout
) -> jax.ShapeDtypeStruct:
    """Returns `leaf` in the shape in which it was saved, sharded much like its final form."""
    if not isinstance(leaf.sharding, NamedSharding):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    mesh = leaf.sharding.mesh
    spec = leaf.sharding.spec
    parts = [*spec, *[None] * (len(leaf.shape) - len(spec))]
    if setup.model.in_stack(path):
        leading = _over_stages(layout.shape, mesh.shape["pipeline"])
        parts = [*leading, *parts[len(setup.model.stage_layout.shape) :]]
    sharding = NamedSharding(mesh, evenly(parts, shape, mesh.shape))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def lay_out_again(setup: Setup, path: str, read: Any, abstract: Any, layout: StageLayout) -> Any:
    """Converts a parameter's leaves, read in the shapes of `as_saved`, to those of `abstract`."""
    in_stack = setup.model.in_stack(path)

    def kind(x: jax.Array | jax.ShapeDtypeStruct) -> tuple:
        return x.shape, x.dtype

    if not in_stack and jax.tree.map(kind, read) == jax.tree.map(kind, abstract):
        return read
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def laid_out(x: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return in_shape(setup, path, x, leaf.shape, layout).astype(leaf.dtype)

    run = jax.jit(lambda tree: jax.tree.map(laid_out, tree, abstract), out_shardings=shardings)
    return run(read)


def in_shape(
    setup: Setup, path: str, x: jax.Array, target: Shape, layout: StageLayout
) -> jax.Array:
    """Returns a leaf of the parameter at `path` in the shape `target`.

    If it belongs to the stack, it has the layout `layout` so far.
    """
    if setup.model.in_stack(path):
        x = setup.model.stage_layout.staged(layout.unstaged(x))
    shape = without_padding(setup, path, target)
    return add_zeros(cut_to(x, shape), shape, target)


def cut_to(x, shape: Sequence[int]):
    """Returns the leading elements of x along each dim, cut to `shape`."""
    return x[tuple(map(slice, shape))]


def _over_stages(shape: Shape, stages: int) -> list[str | None]:
    """Returns the spec of a stack whose first divisible leading dim is split over the stages."""
    parts: list[str | None] = [None] * len(shape)
    divided = [dim for dim, size in enumerate(shape) if size % stages == 0]
    if stages > 1 and divided:
        parts[divided[0]] = "pipeline"
    return parts


def evenly(parts: Sequence, shape: Shape, sizes: Mapping[str, int]) -> P:
    """Returns `parts` as a spec in which every split is even.

    A dim that does not divide is left whole, and a whole dim that does is split instead, if there
    is one.
    """
    parts = [*parts, *[None] * (len(shape) - len(parts))]
    even = list(parts)
    for dim, part in enumerate(parts):
        ways = math.prod(sizes[axis] for axis in axes_of_dim(part))
        if shape[dim] % ways == 0:
            continue
        even[dim] = None
        others = (
            at
            for at, size in enumerate(shape)
            if even[at] is None and at != dim and size % ways == 0
        )
        instead = next(others, None)
        if instead is not None:
            even[instead] = part
    return P(*even)
