"""Host arrays to device arrays: each process makes the rows of a batch that its own devices hold, and no others."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.axes import BATCH_AXES, Rules, partition_spec
from spmdtrain.train.loss import Batch

Samples = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def batch_sharding(mesh: Mesh, rules: Rules, name: str) -> NamedSharding:
    """Of the batch entry `name`: sequences over data x fsdp x expert, time as the activation table says."""
    time = rules.activation_spec(("time",), (0,)) if name != "sample" else ()
    return NamedSharding(mesh, P(None, BATCH_AXES, *time))


def sequences_at_once(config: RunConfig, rules: Rules) -> tuple[int, int]:
    """(accumulation, sequences over all shards per microbatch): how a global batch is cut.

    global_batch = microbatch x data x fsdp x expert x accumulation.
    """
    sizes = {axis: rules.sizes[axis] for axis in BATCH_AXES}
    shards = int(np.prod(list(sizes.values())))
    batch, micro = config.train.global_batch, config.train.microbatch
    split = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one shard"
    at_once = shards * (micro or 1)
    if batch % at_once:
        product = f"{split} x train.microbatch={micro}" if micro else split
        below, above = batch // at_once * at_once, -(-batch // at_once) * at_once
        raise ConfigError(
            f"train.global_batch={batch} is not divisible by {product} = {at_once}",
            fix=f"--set train.global_batch={below or above}" + (f" or {above}" if below else ""),
        )
    sequences = at_once if micro else batch
    names, shape = ("batch", "time"), (sequences, config.train.sequence_length)
    # for its refusals: a length that does not divide, time over a mesh axis of the batch
    partition_spec(rules.activations, "activations", names, shape, rules.sizes, at="train.sequence_length")
    return batch // sequences, sequences


def abstract_batch(config: RunConfig, mesh: Mesh, rules: Rules) -> dict[str, jax.ShapeDtypeStruct]:
    """What `to_devices` makes of a training batch, as shapes with their shardings."""
    rows, time = sequences_at_once(config, rules), (config.train.sequence_length,)
    kinds = {"tokens": "int32", "targets": "int32", "mask": "float32", "sample": "uint32"}
    if config.data.packing == "documents":
        kinds |= {"segment_ids": "int32", "positions": "int32"}

    def one(name: str, dtype: str) -> jax.ShapeDtypeStruct:
        shape = rows if name == "sample" else rows + time
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh, rules, name))

    return {name: one(name, dtype) for name, dtype in kinds.items()}


def to_devices(samples: Samples, ids: np.ndarray, shape: tuple[int, int], mesh: Mesh, rules: Rules) -> Batch:
    """The batch of the samples `ids`, cut as `shape` = (accumulation, sequences), as global arrays.

    `samples(ids)` gives rows; it is asked for every row that a device of this process holds, once.
    """
    ids = ids.reshape(shape)
    made: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def rows(columns: slice) -> dict[str, np.ndarray]:
        start, stop, _ = columns.indices(shape[1])
        if (start, stop) not in made:
            mine = ids[:, start:stop]
            found = samples(mine.ravel())
            made[start, stop] = {name: x.reshape(*mine.shape, *x.shape[1:]) for name, x in found.items()}
        return made[start, stop]

    here = batch_sharding(mesh, rules, "sample").addressable_devices_indices_map(shape)
    first = rows(next(iter(here.values()))[1])

    def assemble(name: str) -> jax.Array:
        whole = (*shape, *first[name].shape[2:])
        return jax.make_array_from_callback(
            whole,
            batch_sharding(mesh, rules, name),
            lambda index: rows(index[1])[name][(slice(None), slice(None), *index[2:])],
        )

    return {name: assemble(name) for name in first}
