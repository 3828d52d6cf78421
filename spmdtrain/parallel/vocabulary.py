"""Looking up rows of a table whose vocabulary is split over mesh axes.

Each device looks up the ids that fall into its rows and the parts are summed. XLA can partition a plain gather too, but
inside a region that is manual over some axes its partitioner aborts the process (seen with jax 0.10 and 0.12).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.axes import Rules


def lookup(rules: Rules, manual: Sequence[str] = ()) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`look(table [vocab, embed], ids [batch, time]) -> [batch, time, embed]`, the table whole over `fsdp`.

    `manual`: mesh axes that the enclosing shard_map splits by hand already.
    """

    def look(table: jax.Array, ids: jax.Array) -> jax.Array:
        table_spec = rules.parameter_spec(("vocab", None), table.shape, "embedding table", drop=("fsdp", *manual))
        if table_spec[0] is None:
            return table[ids]
        axes = table_spec[0] if isinstance(table_spec[0], tuple) else (table_spec[0],)
        ids_spec = rules.activation_spec(("batch", "time"), ids.shape, drop=manual)

        def local(rows, ids):
            place = ids - jax.lax.axis_index(axes) * rows.shape[0]
            mine = (place >= 0) & (place < rows.shape[0])
            found = jnp.where(mine[..., None], rows[jnp.where(mine, place, 0)], 0)
            return jax.lax.psum(found, axes)

        rest = {axis for axis in rules.sizes if axis not in manual}
        specs = {"in_specs": (table_spec, ids_spec), "out_specs": P(*ids_spec, None)}
        return jax.shard_map(local, axis_names=rest, check_vma=False, **specs)(table, ids)

    return look
