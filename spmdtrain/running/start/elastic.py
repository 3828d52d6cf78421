"""Fits the mesh of a resumed run to the available devices.

The axes `data` and then `fsdp` shrink or grow; pipeline, expert, context and tensor stay. The
global batch and the order of samples stay too: a device never takes more sequences at once than
before, and accumulation makes up for the rest. So the run computes what it would have computed,
except for rounding: sums have another order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spmdtrain.checkpoints.restore import read_document
from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.axes import batch_shards
from spmdtrain.parallel.mesh import fill

ELASTIC = ("data", "fsdp")


@dataclass(frozen=True)
class MeshSizes:
    """The sizes of the mesh axes, and the microbatch: the sequences that a shard of the batch takes
    at once.
    """

    sizes: Mapping[str, int]
    microbatch: int | None

    def accumulation(self, global_batch: int) -> int:
        """Returns the number of microbatches of a step."""
        at_once = batch_shards(self.sizes) * (self.microbatch or 1)
        return global_batch // at_once if self.microbatch else 1


@dataclass(frozen=True)
class Adapted:
    """The config to train with, in place of the one that was `asked` for; `line` says why."""

    config: RunConfig
    asked: RunConfig
    line: str

    def as_asked(self, document: dict[str, Any]) -> dict[str, Any]:
        """Returns config.json with the mesh that was asked for, so that a resume can restore it."""
        values = document["config"]
        mesh = self.asked.mesh.model_dump()
        train = values["train"] | {"microbatch": self.asked.train.microbatch}
        return document | {"config": values | {"mesh": mesh, "train": train}}


def adapt(config: RunConfig, run: Path, devices: Sequence[jax.Device] | None) -> Adapted | None:
    """Returns the config with a mesh for these devices (default: all) with which `run` is resumed.

    None: the config stays the same, because its mesh fits, because its mesh is not the one the run
    had (the user has changed it), or because `mesh.elastic` is false. Raises ConfigError if no such
    mesh divides the global batch.
    """
    count = len(jax.devices() if devices is None else devices)
    fits = fill(config.mesh.sizes, count) is not None
    if fits or not config.mesh.elastic or not _is_mesh_of(run, config):
        return None
    layout = choose_layout(config, count)
    if layout is None:
        return None
    mesh = config.mesh.model_copy(update=dict(layout.sizes))
    train = config.train.model_copy(update={"microbatch": layout.microbatch})
    adapted = config.model_copy(update={"mesh": mesh, "train": train})
    steps = layout.accumulation(config.train.global_batch)
    line = (
        f"the mesh {_described(config.mesh.sizes)} does not fit the {count} devices "
        f"that are available: continuing with {_described(layout.sizes)} and {steps} "
        f"{'microbatch' if steps == 1 else 'microbatches'}, the same batches in the same order"
    )
    return Adapted(adapted, config, line)


def choose_layout(config: RunConfig, count: int) -> MeshSizes | None:
    """Returns the mesh for `count` devices that is nearest to that of the config.

    `fsdp` stays if it can; otherwise it becomes the largest smaller divisor, so that a device holds
    as little as possible. None if the fixed axes do not divide the devices. Raises ConfigError if
    the shards do not divide the global batch.
    """
    sizes = config.mesh.sizes
    stay = math.prod(size for axis, size in sizes.items() if axis not in ELASTIC)
    if stay < 1 or count % stay:  # below 1: one of them is to be filled
        return None
    rest = count // stay
    shards = rest * sizes["expert"]
    batch = math.gcd(*(stage.global_batch for stage in config.train.timetable))
    if batch % shards:
        raise _does_not_divide(config, count, stay)
    before = batch_shards({axis: max(size, 1) for axis, size in sizes.items()})
    largest = config.train.microbatch or max(config.train.global_batch // before, 1)
    microbatch = max(
        divisor for divisor in range(1, largest + 1) if batch % (shards * divisor) == 0
    )
    fsdp = max(divisor for divisor in range(1, max(sizes["fsdp"], 1) + 1) if rest % divisor == 0)
    chosen = {**sizes, "data": rest // fsdp, "fsdp": fsdp}
    return MeshSizes(chosen, microbatch)


def _is_mesh_of(run: Path, config: RunConfig) -> bool:
    """Returns True if the config asks for the mesh in the recorded configuration of the run."""
    try:
        document, _ = read_document(run)
    except CheckpointError:
        return False
    then = document["config"].get("mesh", {})
    return all(then.get(axis, 1) == size for axis, size in config.mesh.sizes.items())


def _does_not_divide(config: RunConfig, count: int, stay: int) -> ConfigError:
    """Returns the error for `count` devices; each group of `stay` of them shares its sequences."""
    batch = math.gcd(*(stage.global_batch for stage in config.train.timetable))
    expert = config.mesh.expert
    shards = count // stay * expert
    groups = [number for number in range(1, batch // expert + 1) if batch % (number * expert) == 0]
    here = count // stay
    near = [max((number for number in groups if number < here), default=0)]
    near += [min((number for number in groups if number > here), default=0)]
    counts = " or ".join(str(number * stay) for number in near if number)
    below = batch // shards * shards
    batches = " or ".join(str(number) for number in (below, below + shards) if number)
    return ConfigError(
        f"the run cannot continue with {count} devices: train.global_batch={batch} is not "
        f"divisible by {shards} shards",
        asked=f"mesh {_described(config.mesh.sizes)}",
        found=f"{count} devices",
        fix=f"{counts} devices, or --set train.global_batch={batches}",
    )


def _described(sizes: Mapping[str, int]) -> str:
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size != 1]
    return " x ".join(parts) or "of one device"
