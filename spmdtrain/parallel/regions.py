"""Regions of a program in which some mesh axes are manual, and how activations are laid out inside and outside them.

In a manual region (`jax.shard_map`) code sees each device's own part of what those axes split, and says every
collective itself. Axes that are not manual stay automatic: XLA partitions over them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of, locally
from spmdtrain.parallel.axes import BATCH_AXES, Rules


def manual_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes over which the training step is manual.

    Always `pipeline` and `data`. With a pipeline all axes of the batch: left automatic, their
    reductions and gathers would run at every tick.
    """
    if sizes["pipeline"] > 1:
        return ("pipeline", *BATCH_AXES)
    return ("pipeline", "data")


def manual_region(function: Callable, mesh: Mesh, manual: Collection[str], in_specs, out_specs) -> Callable:
    """`function` on each device's part of what the `manual` mesh axes split.

    check_vma is off: gradients are taken inside, where those of parameters must not be summed
    over `data` a second time.
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
    """`constrain(x, *logical_axes)`: a sharding constraint as the activation table says.

    `manual`: the manual axes of the region around it, which a constraint may not name.
    """

    def constrain(x: jax.Array, *names: str | None) -> jax.Array:
        spec = rules.activation_spec(names, x.shape, drop=manual)
        if all(part is None for part in spec):
            return x
        return jax.lax.with_sharding_constraint(x, spec)

    return constrain


def make_local_map(rules: Rules, manual: Sequence[str] = ()) -> Callable[..., jax.Array]:
    """`local_map(function, arrays, names, out)`: `function(*arrays)` on each device's own part.

    For kernels, which XLA cannot partition. `names` are the logical axes of each array (an array
    may be None), looked up in the activation table; along an unnamed dim an array comes whole.
    `out` are those of the one result, each of them among `names`.

    What several devices share (keys, where queries are split over time) has a gradient that is
    summed over them, in float32.
    """

    def local_map(
        function: Callable,
        arrays: Sequence,
        names: Sequence[Sequence[str | None]],
        out: Sequence[str | None],
    ):
        specs = []
        parts = {None: None}
        for x, names_of_x in zip(arrays, names, strict=True):
            if x is None:
                specs.append(P())
            else:
                specs.append(rules.activation_spec(names_of_x, x.shape, drop=manual))
            parts |= dict(zip(names_of_x, specs[-1], strict=False))
        axes = [axes_of(spec) for spec in specs]
        dtypes = [getattr(x, "dtype", None) for x in arrays]

        def widen(x, spec: P, own: set[str]):
            """Shared 16-bit arrays enter in float32: the sum of their gradients runs in it."""
            shared = own != set.union(*axes)
            if x is None or not shared or x.dtype not in (jnp.bfloat16, jnp.float16):
                return x
            gathered = jax.lax.with_sharding_constraint(x, spec)  # before it is twice as large
            return gathered.astype(jnp.float32)

        def narrowed(*arrays):
            given = zip(arrays, dtypes, strict=True)
            return function(*(None if x is None else x.astype(dtype) for x, dtype in given))

        region = locally(narrowed, tuple(specs), P(*(parts[name] for name in out)))
        return region(*map(widen, arrays, specs, axes))

    return local_map
