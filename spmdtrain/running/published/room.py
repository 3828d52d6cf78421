"""Refuses an import that has no room, in memory or on disk, before any number is read."""

import math
import os
import shutil
from pathlib import Path

import jax

from spmdtrain.config.errors import StorageError
from spmdtrain.interop.published_weights import in_words
from spmdtrain.processes.processes import this_process, together
from spmdtrain.running.guards.host_memory import host_bytes
from spmdtrain.running.start.directory import refuse_links
from spmdtrain.train.setup import Setup


def check_room(run: Path, setup: Setup) -> None:
    """Raises StorageError if there is no memory for the weights of `setup`, or no disk for `run`.

    All processes call it; process 0 looks at the disk, as it alone makes the directory.
    """
    with together():
        _check_memory(setup)
        if this_process()[0] == 0:
            _check_disk(run, sum(map(_bytes, setup.state.params.values())))


def _check_memory(setup: Setup) -> None:
    """Refuses weights that are larger than all the memory of this host, if its CPUs hold them."""
    own = [device for device in setup.mesh.local_devices if device.platform == "cpu"]
    total = host_bytes()
    if not own or total is None:
        return
    needed = sum(_bytes_on(device, x) for x in setup.state.params.values() for device in own)
    if needed > total:
        raise StorageError(
            "the weights do not fit into the memory of this host",
            asked=in_words(needed),
            found=in_words(total),
            fix="--dtype bfloat16, or --set mesh.fsdp=N over more hosts",
        )


def _bytes(x: jax.Array) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _bytes_on(device: jax.Device, x: jax.Array) -> int:
    """Returns the bytes of the part of an array, or of its description, that a device holds."""
    if device not in x.sharding.device_set:
        return 0
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _check_disk(run: Path, needed: int) -> None:
    refuse_links(run)
    place = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {run}", found=f"{place}", fix="another --out")
    free = shutil.disk_usage(place).free
    if needed > free:
        raise StorageError(
            f"the disk of {run} has no room for the weights",
            asked=in_words(needed),
            found=f"{in_words(free)} free in {place}",
            fix="another --out",
        )
