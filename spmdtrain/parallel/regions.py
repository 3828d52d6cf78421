"""Makes regions with some manual mesh axes, and lays out activations inside and outside them.

In a manual region (`jax.shard_map`) code sees each device's own part of what those axes split, and
writes every collective itself. Axes that are not manual stay automatic: XLA partitions over them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of, locally
from spmdtrain.parallel.axes import BATCH_AXES, STREAM, Rules, axes_of_dim
from spmdtrain.parallel.reduce import gather_whole, psum_tree

# The mesh axes over which the training step is manual: the stages, and all axes of the batch. Left
# to XLA, an axis of the batch costs traffic that grows with the number of devices: the partitioner
# gathers the batch for the gradient of the embedding table, and sums gradients in compute
# precision.
MANUAL_AXES = ("pipeline", *BATCH_AXES)


def manual_region(
    function: Callable, mesh: Mesh, manual: Collection[str], in_specs, out_specs
) -> Callable:
    """Returns `function` applied to each device's part of what the `manual` mesh axes split.

    check_vma is off: gradients are taken inside, where those of parameters must not be summed over
    `data` a second time.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(manual),
        check_vma=False,
    )


def make_constrain(rules: Rules, manual: Sequence[str] = ()) -> Callable[..., jax.Array]:
    """Returns `constrain(x, *logical_axes)`: a sharding constraint from the activation table.

    If every name is None, x is gathered on every device.
    `manual`: the manual axes of the surrounding region, which a constraint may not name.
    """

    several = any(size > 1 for size in rules.sizes.values())

    def constrain(x: jax.Array, *names: str | None) -> jax.Array:
        spec = rules.activation_spec(names, x.shape, drop=manual)
        is_split = any(part is not None for part in spec)
        wants_whole = several and all(name is None for name in names)
        if not is_split and not wants_whole:
            return x  # no rule splits it: XLA decides
        return jax.lax.with_sharding_constraint(x, spec)

    return constrain


def make_sliced_sum(
    rules: Rules, axis: str, manual: Sequence[str]
) -> Callable[[jax.Array], jax.Array]:
    """Returns `sum_slices(x)`: the sum over mesh axis `axis` of the residual stream x [b, t, e].

    Devices that differ only in `tensor` hold the same x. Each of them sums a slice of its tokens,
    if they divide, so that every element crosses `axis` once; over `tensor`, where links are fast,
    the slices are put together again. The transpose does the same with the cotangent. An x
    with other dims is summed as it is.
    """

    def sum_slices(x: jax.Array) -> jax.Array:
        if x.ndim != len(STREAM):
            return psum_tree(x, (axis,))
        rests = rules.activation_spec(STREAM, x.shape, drop=manual)
        slices = split_time(rests, x.shape, rules.sizes)
        constrain = jax.lax.with_sharding_constraint
        if slices == rests:
            return psum_tree(x, (axis,))
        # Both layouts appear on both sides of the sum: the sum of the cotangent is one of slices
        # too, and XLA does not spread the slices over the layers.
        summed = psum_tree(constrain(constrain(x, rests), slices), (axis,))
        return constrain(constrain(summed, slices), rests)

    return sum_slices


def make_sum_over_batch(rules: Rules) -> Callable[[Any], Any]:
    """Returns `sum_over_batch(tree)`: sums over all shards of the batch, without a gradient."""
    axes = [axis for axis in BATCH_AXES if rules.sizes[axis] > 1]
    return lambda tree: psum_tree(jax.lax.stop_gradient(tree), axes)


def split_time(spec: P, shape: Sequence[int], sizes: Mapping[str, int]) -> P:
    """Returns the `spec` of a stream [b, t, e] with the tokens split over `tensor` as well.

    It is unchanged if `tensor` already splits a dim, or does not divide a device's tokens.
    """
    over_time = axes_of_dim(spec[1])
    ways = math.prod(sizes[axis] for axis in (*over_time, "tensor"))
    if sizes["tensor"] == 1 or "tensor" in axes_of(spec) or shape[1] % ways:
        return spec
    return P(spec[0], (*over_time, "tensor"), spec[2])


@dataclass(frozen=True)
class Whole:
    """A dim that is sharded like the logical axis `name` and enters whole; for `local_map`.

    It stays split over the mesh axes of the logical axis `but_for`, if given. They must be the
    first ones that split `name`.
    """

    name: str
    but_for: str | None = None


Name = str | Whole | None  # of one dim


def make_local_map(rules: Rules, manual: Sequence[str] = ()) -> Callable[..., Any]:
    """Returns `local_map(function, arrays, names, out)`: `function(*arrays)` on each device's part.

    For kernels, which XLA cannot partition. `names` are the logical axes of each array (an array
    may be None), looked up in the activation table. Along a dim named `Whole(axis)` an array is
    gathered, and its gradient is scattered back (for example keys, if queries are split over time).
    Along an unnamed dim an array comes whole, and its gradient is summed over the devices that
    share it. Both sums run in float32. `out` are the names of the one result, or a tuple of the
    names of each result; each of them is among `names`.
    """

    def local_map(
        function: Callable,
        arrays: Sequence,
        names: Sequence[Sequence[Name]],
        out: Sequence[str | None] | tuple[Sequence[str | None], ...],
    ):
        specs = []
        gathers = []
        parts: dict[str | None, Any] = {None: None}
        for x, names_of_x in zip(arrays, names, strict=True):
            if x is None:
                specs.append(P())
                gathers.append([])
                continue
            spec = rules.activation_spec(list(map(_resting, names_of_x)), x.shape, drop=manual)
            specs.append(spec)
            gathers.append(_gathers(rules, names_of_x, spec))
            named = zip(names_of_x, spec, strict=True)
            parts |= {name: part for name, part in named if not isinstance(name, Whole)}
        axes = [axes_of(spec) for spec in specs]
        dtypes = [getattr(x, "dtype", None) for x in arrays]

        def widen(x, spec: P, own: set[str]):
            """Widens shared 16-bit arrays to float32, in which their gradients are then summed."""
            shared = own != set.union(*axes)
            if x is None or not shared or x.dtype not in (jnp.bfloat16, jnp.float16):
                return x
            gathered = jax.lax.with_sharding_constraint(x, spec)  # while it is still 16-bit
            return gathered.astype(jnp.float32)

        def narrow(x, dtype, gathers_of_x):
            if x is None:
                return None
            x = x.astype(dtype)
            for dim, over in gathers_of_x:
                x = gather_whole(x, over, dim)
            return x

        def narrowed(*arrays):
            return function(*map(narrow, arrays, dtypes, gathers))

        def spec_of(names_of_result: Sequence[Any]) -> P:
            return P(*(parts[name] for name in names_of_result))

        results: Any = out
        is_one = all(name is None or isinstance(name, str) for name in out)
        out_specs = spec_of(results) if is_one else tuple(map(spec_of, results))
        region = locally(narrowed, tuple(specs), out_specs)
        return region(*map(widen, arrays, specs, axes))

    return local_map


def _resting(name: Name) -> str | None:
    return name.name if isinstance(name, Whole) else name


def _gathers(rules: Rules, names: Sequence[Name], spec: P) -> list[tuple[int, tuple[str, ...]]]:
    """Returns (dim, mesh axes to gather it over) of every dim that is sharded and enters whole."""
    gathers = []
    for dim, (name, part) in enumerate(zip(names, spec, strict=True)):
        if isinstance(name, Whole):
            still_split = rules.activations[name.but_for] if name.but_for else ()
            over = tuple(axis for axis in axes_of_dim(part) if axis not in still_split)
            if over:
                gathers.append((dim, over))
    return gathers
