"""Reducing gradients inside the manual region equals a plain sum, in whatever order axes split
whatever dims.
"""

import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.parallel.axes import drop_axes, keep_axes
from spmdtrain.parallel.reduce import reduce_gradients, reduction, scatter_dim, scattered_spec
from spmdtrain.parallel.regions import manual_region

MANUAL = ("pipeline", "data", "fsdp", "expert")
SIZES = {"pipeline": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
MESHES = [
    SIZES,
    SIZES | {"expert": 2, "tensor": 1},
    SIZES | {"data": 1, "expert": 2},
    SIZES | {"data": 1, "pipeline": 2},
    SIZES | {"data": 1, "fsdp": 4},
    SIZES | {"pipeline": 2, "data": 1, "expert": 2, "tensor": 1},
]
SHAPE = (8, 16, 8)


def specs(sizes: dict[str, int], seed: int, count: int) -> list[P]:
    """Random specs of three dims: every axis on some dim or on none, several on a dim in any
    order.
    """
    draw = random.Random(seed)
    axes = [axis for axis, size in sizes.items() if size > 1]
    found = []
    for _ in range(count):
        dims = [[], [], []]
        for axis in draw.sample(axes, len(axes)):
            if (dim := draw.randrange(4)) < 3:
                dims[dim].append(axis)
        # stages hold whole layers: nothing else splits the dim that pipeline does
        if any("pipeline" in axes and len(axes) > 1 for axes in dims):
            continue
        found.append(P(*(tuple(axes) or None for axes in dims)))
    return found


@pytest.mark.parametrize(
    "sizes", MESHES, ids=lambda sizes: " ".join(f"{a}{n}" for a, n in sizes.items() if n > 1)
)
def test_reduced_gradients_are_the_sum_over_all_shards_in_every_order_of_axes(sizes):
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
    )
    active = [axis for axis in MANUAL if sizes[axis] > 1]
    wanted = {str(at): spec for at, spec in enumerate(specs(sizes, 0, 12))}
    assert len(set(map(str, wanted.values()))) > 6, "the draw is too poor to tell orders apart"

    def part(path: str, spec: P, at: dict[str, jax.Array]) -> jax.Array:
        """What this shard contributes: of another size on every shard; a stage's own slice where
        stages split it.
        """
        whole = jnp.arange(math.prod(SHAPE), dtype=jnp.float32).reshape(SHAPE) + int(path)
        weight = 1.0
        for position, axis in enumerate(active):
            split_by_stage = axis == "pipeline" and any("pipeline" in (p or ()) for p in spec)
            weight += 0 if split_by_stage else (position + 1) * at[axis]
        for dim, axes in enumerate(spec):
            if axes and "pipeline" in axes:
                size = SHAPE[dim] // sizes["pipeline"]
                whole = jax.lax.dynamic_slice_in_dim(whole, at["pipeline"] * size, size, dim)
        return weight * whole

    def local():
        at = {axis: jax.lax.axis_index(axis) for axis in active}
        gradients = {path: part(path, spec, at) for path, spec in wanted.items()}
        reductions = {path: reduction(spec, active, {"pipeline"}) for path, spec in wanted.items()}
        return reduce_gradients(
            gradients, reductions, {path: drop_axes(MANUAL, spec) for path, spec in wanted.items()}
        )

    out_specs = {path: keep_axes(MANUAL, spec) for path, spec in wanted.items()}
    region = manual_region(local, mesh, MANUAL, (), out_specs)
    shardings = {path: NamedSharding(mesh, spec) for path, spec in wanted.items()}
    got = jax.device_get(jax.jit(region, out_shardings=shardings)())
    for path, spec in wanted.items():
        own = any("pipeline" in (part or ()) for part in spec)
        summed = [axis for axis in active if not (own and axis == "pipeline")]
        shards = list(itertools.product(*(range(sizes[axis]) for axis in summed)))
        weights = {axis: active.index(axis) + 1 for axis in summed}
        total = sum(
            1 + sum(weights[a] * i for a, i in zip(summed, at, strict=True)) for at in shards
        )
        want = total * (np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + int(path))
        np.testing.assert_array_equal(got[path], want, err_msg=str(spec))


@pytest.mark.parametrize("data", [2, 3, 4])
def test_zero_splits_a_dim_that_is_whole_and_keeps_every_other_split(data):
    found = set()
    sizes = SIZES | {"context": 2, "data": data}
    for spec in specs(SIZES | {"data": 1, "context": 2}, data, 40):
        dim = scatter_dim(SHAPE, spec, sizes)
        split = scattered_spec(spec, dim)
        assert axes_of(split) == axes_of(spec) | ({"data"} if dim is not None else set())
        whole = [at for at, part in enumerate(spec) if part is None]
        if any(SHAPE[at] % data == 0 for at in whole):
            assert dim in whole
            assert SHAPE[dim] % data == 0, "padded where another dim divides"
        found.add(dim)
    assert found >= {0, 1, 2}


def test_zero_shares_a_dim_with_fsdp_before_it_pads_one_or_gives_up():
    sizes = SIZES | {"fsdp": 2, "data": 4}
    spec = P(None, "fsdp", None, "tensor")
    assert scatter_dim((5, 16, 3, 32), spec, sizes) == 1
    assert scattered_spec(spec, 1) == P(None, ("fsdp", "data"), None, "tensor")
    assert scatter_dim((5, 4, 3, 32), spec, sizes) == 0, "4 / 2 has no 4 parts, and 5 can be padded"
    assert scatter_dim((5, 4, 3, 32), spec, sizes, stacked=1) is None


def test_zero_pads_the_largest_dim_that_is_whole_and_no_layers():
    three = SIZES | {"data": 3}
    assert scatter_dim((5, 4, 3), P(None, None, None), three) == 2
    assert scatter_dim((5, 4, 3), P(None, None, "tensor"), three) == 0
    assert scatter_dim((5, 4, 3), P(None, None, "tensor"), three, stacked=1) == 1
    doubled = scatter_dim((5, 4, 3), P(None, None, "tensor"), SIZES | {"data": 7})
    assert doubled is None, "it would be doubled"
