"""Puts batches on devices: divides a global batch, and assigns each process the rows that it makes.

It also chooses the order of the tokens, which is that of the data except with ring attention.

A batch is a dict of arrays [accumulation, sequences, time]; those in OF_SEQUENCES have no time dim,
and those that parts add may have more.
One microbatch of it, [sequences, time], is what a model processes at once.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, TrainConfig
from spmdtrain.parallel.axes import BATCH_AXES, Rules, axes_of_dim, batch_shards, partition_spec

if TYPE_CHECKING:
    from spmdtrain.parallel.context.context_method import ContextMethod

Batch = dict[str, jax.Array]
# Further arrays of a batch by name: the dtype (int32: ids of the vocabulary), and the dims that
# follow those of tokens.
BatchArrays = Mapping[str, tuple[str, tuple[int, ...]]]
Samples = Callable[[np.ndarray], Mapping[str, np.ndarray]]
OF_SEQUENCES = ("sample", "source")  # arrays with one number per sequence


class BatchShape(NamedTuple):
    """The division of a global batch: `accumulation` microbatches of `sequences` over all shards.

    global_batch = accumulation x sequences, sequences = microbatch x data x fsdp x expert.
    """

    accumulation: int
    sequences: int


def cut_batch(run: RunConfig, rules: Rules, name: str = "train.global_batch") -> BatchShape:
    """Returns the shape of `train.global_batch` on this mesh.

    Raises ConfigError if it does not divide, or has more microbatches than `precision.accumulate`
    can sum. `name` is what the user calls it.
    """
    config = run.train
    sizes = {axis: rules.sizes[axis] for axis in BATCH_AXES}
    batch = config.global_batch
    at_once = batch_shards(sizes) * (config.microbatch or 1)
    if batch % at_once:
        raise _does_not_divide(config, sizes, at_once, name)
    sequences = at_once if config.microbatch else batch
    # Refuses a length that does not divide, and time over a mesh axis of the batch.
    partition_spec(
        rules.activations,
        "activations",
        ("batch", "time"),
        (sequences, config.sequence_length),
        rules.sizes,
        at="train.sequence_length",
    )
    shape = BatchShape(batch // sequences, sequences)
    run.precision.check_sum(shape.accumulation)
    return shape


def _does_not_divide(
    config: TrainConfig, sizes: Mapping[str, int], at_once: int, name: str
) -> ConfigError:
    split = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one shard"
    product = f"{split} x train.microbatch={config.microbatch}" if config.microbatch else split
    below = config.global_batch // at_once * at_once
    above = below + at_once
    key = f"--set {name}" if "[" not in name else name  # a table of a list is set in a file
    return ConfigError(
        f"{name}={config.global_batch} is not divisible by {product} = {at_once}",
        fix=f"{key}={below or above}" + (f" or {above}" if below else ""),
    )


def choose_context_method(
    config: RunConfig, rules: Rules, order_reason: str
) -> "ContextMethod | None":
    """Returns how attention reaches the keys of other devices, which decides the order of tokens.

    None: no mesh axis splits a sequence. `order_reason`: why the model needs the order of the data,
    or "". Raises ConfigError if the requested method cannot run.
    """
    (over_time,) = rules.activation_spec(("time",), (0,))
    if all(rules.sizes[axis] == 1 for axis in axes_of_dim(over_time)):
        return None
    from spmdtrain.parallel.context.context_method import find_context_method

    model = config.model
    length = config.train.sequence_length
    heads = model.exchangeable_heads
    return find_context_method(model.context_attention, rules, length, heads, order_reason)


def batch_sharding(mesh: Mesh, rules: Rules, name: str) -> NamedSharding:
    """Returns the sharding of the entry `name` of a batch.

    Sequences are split over the axes of the batch, and time as in the activation table.
    """
    time = rules.activation_spec(("time",), (0,)) if name not in OF_SEQUENCES else ()
    return NamedSharding(mesh, P(None, BATCH_AXES, *time))


def abstract_batch(
    shape: BatchShape,
    config: RunConfig,
    mesh: Mesh,
    rules: Rules,
    zigzag: int = 1,
    further: BatchArrays = MappingProxyType({}),
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract form of what `to_devices` returns for a training batch: shapes with
    shardings. `further`: the arrays that parts add.
    """
    data, length = config.data, config.train.sequence_length
    dtypes = {"tokens": "int32", "targets": "int32", "mask": "float32", "sample": "uint32"}
    if data.mix:
        dtypes |= {"source": "int32"}
    if data.packing != "stream":
        dtypes |= {"segment_ids": "int32", "positions": "int32"}
    elif zigzag > 1:
        dtypes |= {"positions": "int32"}
    if config.train.needs_reference:
        dtypes |= {"reference": "float32"}

    def one(name: str, dtype: str, dims: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        of_tokens = () if name in OF_SEQUENCES else (length,)
        whole = (*shape, *of_tokens, *dims)
        return jax.ShapeDtypeStruct(whole, dtype, sharding=batch_sharding(mesh, rules, name))

    arrays = {name: one(name, dtype) for name, dtype in dtypes.items()}
    return arrays | {name: one(name, *array) for name, array in further.items()}


def _in_order(rows: Mapping[str, np.ndarray], method: "ContextMethod") -> Mapping[str, np.ndarray]:
    """Returns rows of the data [..., time] in the order of a method, with their positions."""
    length = rows["tokens"].shape[-1]
    order = method.token_order(length)
    if order is None:
        return rows
    from_zero = np.broadcast_to(np.arange(length, dtype=np.int32), rows["tokens"].shape)
    return reordered({"positions": from_zero} | dict(rows), order)


def reordered(rows: Mapping[str, np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
    """Returns rows with their tokens, and every array that goes with a token, in this order."""
    time = rows["tokens"].ndim - 1
    return {
        name: x if name in OF_SEQUENCES else x.take(order, axis=time) for name, x in rows.items()
    }


def to_devices(  # noqa: PLR0913 - what a batch consists of, and where it goes
    samples: Samples,
    ids: np.ndarray,
    shape: BatchShape,
    mesh: Mesh,
    rules: Rules,
    method: "ContextMethod | None" = None,
) -> Batch:
    """Returns the samples `ids` [global_batch] as a batch of global arrays.

    `samples(ids)` makes rows on the host. A process asks only for the rows that its own devices
    hold, each once. `method`: the setup's `context_method`.
    """
    ids = ids.reshape(shape)
    made: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def rows(columns: slice) -> dict[str, np.ndarray]:
        start, stop, _ = columns.indices(shape.sequences)
        if (start, stop) not in made:
            mine = ids[:, start:stop]
            sampled = samples(mine.ravel())
            if method:
                sampled = _in_order(sampled, method)
            made[start, stop] = {
                name: x.reshape(*mine.shape, *x.shape[1:]) for name, x in sampled.items()
            }
        return made[start, stop]

    def part(name: str, index: tuple[slice, ...] | None) -> np.ndarray:
        """Returns a local device's part of an array [accumulation, sequences, ...]."""
        assert index is not None
        _, columns, *rest = index
        return rows(columns)[name][(slice(None), slice(None), *rest)]

    here = batch_sharding(mesh, rules, "sample").addressable_devices_indices_map(tuple(shape))
    _, columns = next(index for index in here.values() if index is not None)
    first = rows(columns)

    def assemble(name: str) -> jax.Array:
        whole = (*shape, *first[name].shape[2:])
        sharding = batch_sharding(mesh, rules, name)
        return jax.make_array_from_callback(whole, sharding, partial(part, name))

    return {name: assemble(name) for name in first}
