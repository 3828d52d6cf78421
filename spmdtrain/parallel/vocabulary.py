"""Looking up rows of a table whose vocabulary is split over mesh axes.

Each device looks up the ids that fall into its rows and the parts are summed. XLA can partition a plain gather too, but
inside a region that is manual over some axes its partitioner aborts the process (seen with jax 0.10 and 0.12).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.parallel.axes import BATCH_AXES, Rules
from spmdtrain.parallel.reduce import psum_tree


def make_lookup(rules: Rules, manual: Sequence[str] = ()) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`lookup(table [vocab, embed], ids [batch, time]) -> [batch, time, embed]`, the table whole over `fsdp` and over
    what the ids are split over.

    `manual`: mesh axes that the enclosing shard_map splits by hand already; over `pipeline` the table is this stage's
    rows, or whole: then the first stage finds all.
    """
    left = set(manual) - set(BATCH_AXES)  # over the axes of the batch the table has been gathered
    by_hand = tuple(axis for axis in rules.parameters["vocab"] if axis in left and rules.sizes[axis] > 1)

    def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
        ids_spec = rules.activation_spec(("batch", "time"), ids.shape, drop=manual)
        whole = ("fsdp", *manual, *axes_of(ids_spec))
        table_spec = rules.parameter_spec(("vocab", None), table.shape, "embedding table", drop=whole)
        if by_hand:
            ids = ids - jax.lax.axis_index(by_hand) * table.shape[0]
        if table_spec[0] is None:
            return psum_tree(_own_rows(table, ids), by_hand) if by_hand else table[ids]
        axes = table_spec[0] if isinstance(table_spec[0], tuple) else (table_spec[0],)

        def local(rows, ids):
            found = _own_rows(rows, ids - jax.lax.axis_index(axes) * rows.shape[0])
            return psum_tree(found, (*by_hand, *axes))

        # All of them, those of one device too: XLA's CPU compiler aborts at the 16-bit sum over the batch that the
        # transpose of a region makes for the table, unless the region is manual over every axis.
        rest = {axis for axis in rules.sizes if axis not in manual}
        specs = {"in_specs": (table_spec, ids_spec), "out_specs": P(*ids_spec, None)}
        return jax.shard_map(local, axis_names=rest, check_vma=False, **specs)(table, ids)

    return lookup


def _own_rows(rows: jax.Array, places: jax.Array) -> jax.Array:
    """`rows[places]`, and 0 where a place lies outside."""
    mine = (places >= 0) & (places < rows.shape[0])
    return jnp.where(mine[..., None], rows[jnp.where(mine, places, 0)], 0)
