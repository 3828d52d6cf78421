"""Keeps what the codecs with error feedback carry from step to step, as items of the state.

*Errors*: of each compressed gradient what a data shard has not sent yet, in units of the mean
gradient, so that neither a loss scale nor the number of tokens of a step changes what they mean.
On a mesh with another number of data shards each begins with the same part of their sum, so that
no gradient is lost. *Factors*: the right factors of low-rank sums, which are the same on all data
shards.

A skipped step leaves both as they were. With one data shard there are none.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.feedback.feedback_sums import Codecs
from spmdtrain.parallel.feedback.low_rank import LowRank
from spmdtrain.train.compression.feedback_codecs import feedback_codecs
from spmdtrain.train.items.item import Item, Start, Taken, Value, per_data_shard

NAME = "errors"
Arrays = dict[str, jax.Array]  # by dotted path of the compressed parameters


def _begin_errors(start: Start) -> Arrays | None:
    """Returns zeros [data shards, *shape at rest], float32."""
    shards = start.sizes["data"]
    shapes = {path: (shards, *start.params[path].shape) for path in _codecs(start)}
    return {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes.items()} or None


def _begin_factors(start: Start) -> Arrays | None:
    codecs = _low_rank(start)
    first = {
        path: codec.first_factor(start.params[path].shape, path) for path, codec in codecs.items()
    }
    return first or None


def _codecs(start: Start) -> Codecs:
    return start.subjects.get(NAME, {})


def _low_rank(start: Start) -> dict[str, LowRank]:
    codecs = _codecs(start)
    return {path: codec for path, codec in codecs.items() if isinstance(codec, LowRank)}


def _factors_rest(start: Start, value: Arrays) -> dict[str, P]:
    """Returns specs that split factors like the dims of their parameters."""
    codecs = _low_rank(start)
    specs = {}
    for path in value:
        spec, dims = start.specs[path], start.params[path].ndim
        specs[path] = codecs[path].factor_spec(P(*spec, *[None] * (dims - len(spec))))
    return specs


def _in_equal_parts(errors: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Spreads the sum of the errors evenly over the data shards of `shape`."""
    return jnp.broadcast_to(errors.sum(0) / shape[0], (shape[0], *errors.shape[1:]))


def _update_errors(errors: Arrays, taken: Taken) -> Value:  # noqa: ARG001
    return taken.made[NAME]


def _update_factors(factors: Arrays, taken: Taken) -> Value:  # noqa: ARG001
    return taken.made[FACTORS.name]


ERRORS = Item(
    NAME,
    begin=_begin_errors,
    rests=per_data_shard,
    update=_update_errors,
    subjects=feedback_codecs,
    fold=_in_equal_parts,
)
FACTORS = Item("factors", begin=_begin_factors, rests=_factors_rest, update=_update_factors)
