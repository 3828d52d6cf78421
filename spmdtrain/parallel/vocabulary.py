"""Looks up rows of a table whose vocabulary is split over mesh axes.

Each device looks up the ids that fall into its rows, and the results are summed. XLA can partition
a plain gather and its gradient too, but for some ways of splitting table and ids its partitioner
aborts the process (seen with jax 0.10 and 0.12).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.parallel.axes import BATCH_AXES, Rules, axes_of_dim
from spmdtrain.parallel.reduce import psum_tree, scatter_sum
from spmdtrain.parallel.regions import split_time

Lookup = Callable[[jax.Array, jax.Array], jax.Array]


def make_lookup(rules: Rules, manual: Sequence[str] = ()) -> Lookup:
    """Returns `lookup(table [vocab, embed], ids [batch, time]) -> [batch, time, embed]`.

    The table must be whole over `fsdp` and over the axes that split the ids.

    `manual` are the manual axes of the surrounding region. If `pipeline` is one of them, the table
    is this stage's rows. It may also be the whole table on every stage: then the first stage finds
    all rows, and the others none.
    """
    # The table has been gathered over the axes of the batch; over these it is still split.
    by_hand = tuple(
        axis
        for axis in rules.parameters["vocab"]
        if axis in manual and axis not in BATCH_AXES and rules.sizes[axis] > 1
    )

    def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
        ids_spec = rules.activation_spec(("batch", "time"), ids.shape, drop=manual)
        whole = ("fsdp", *manual, *axes_of(ids_spec))
        table_spec = rules.parameter_spec(
            ("vocab", None), table.shape, "embedding table", drop=whole
        )
        if by_hand:
            ids = ids - jax.lax.axis_index(by_hand) * table.shape[0]
        axes = axes_of_dim(table_spec[0])

        rows_spec = P(*ids_spec, None)
        stream_spec = rules.activation_spec(
            ("batch", "stream_time", None), (*ids.shape, table.shape[1]), drop=manual
        )
        # If the sum over `tensor` leaves a device only a part of the tokens, stages sum that part.
        out_spec = rows_spec
        if axes == ("tensor",) and (by_hand or stream_spec != rows_spec):
            out_spec = split_time(rows_spec, ids.shape, rules.sizes)

        def local(rows: jax.Array, ids: jax.Array) -> jax.Array:
            rows = rows.astype(table.dtype)
            if axes:
                ids = ids - jax.lax.axis_index(axes) * rows.shape[0]
            if not (by_hand or axes):
                return rows[ids]
            own_rows = _rows_or_zero(rows, ids)
            if out_spec == rows_spec:
                return psum_tree(own_rows, (*by_hand, *axes))
            return psum_tree(scatter_sum(own_rows, axes, 1), by_hand)

        if not axes and not axes_of(ids_spec):
            # Each device has all ids and all rows of the table, but perhaps a part of each row:
            # XLA's partitioner aborts where the result is split otherwise (seen with jax 0.10).
            return local(jax.lax.with_sharding_constraint(table, table_spec), ids)

        # Manual over all remaining axes, even those of one device. The transpose of the region sums
        # the table's gradient over devices with other tokens: in float32, because the table enters
        # in it. XLA removes the conversion of the rows there and back.
        automatic = {axis for axis in rules.sizes if axis not in manual}
        region = jax.shard_map(
            local,
            axis_names=automatic,
            in_specs=(table_spec, ids_spec),
            out_specs=out_spec,
            check_vma=False,
        )
        embedded = region(table.astype(jnp.float32), ids)
        if out_spec in (rows_spec, stream_spec):
            return embedded
        return jax.lax.with_sharding_constraint(embedded, stream_spec)

    return lookup


def _rows_or_zero(rows: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns `rows[indices]`, with zeros for indices out of range."""
    inside = (indices >= 0) & (indices < rows.shape[0])
    return jnp.where(inside[..., None], rows[jnp.where(inside, indices, 0)], 0)
