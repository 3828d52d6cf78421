"""Writes arrays into an item that Orbax has begun, one layer of one device's part at a time.

Orbax alone would hold a copy of everything until it is on disk: compressed, or copied from a
device, or because TensorStore copies arrays whose chunks are single layers.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorstore import open as open_array

MOST_IN_FLIGHT = 2**24  # bytes that are being written when the next layer is fetched

Index = tuple[slice, ...]


def write_by_layer(
    folder: Path, arrays: Mapping[str, jax.Array], stacked: Mapping[str, int]
) -> None:
    """Writes this process's parts of arrays, by name, into the item in `folder`.

    `stacked` is the number of leading dims of each array that count its layers: a chunk has one
    layer. The arrays must not be donated meanwhile. Raises OSError or ValueError, as TensorStore
    does.
    """
    in_flight: deque[tuple[int, Any]] = deque()
    for name, x in arrays.items():
        target = _open(folder, name, x, stacked[name])
        for shard in x.addressable_shards:
            if shard.replica_id > 0:
                continue
            for index, part in _layers(shard, stacked[name]):
                while sum(size for size, _ in in_flight) > MOST_IN_FLIGHT:
                    in_flight.popleft()[1].result()
                written = target[index].write(part, can_reference_source_data_indefinitely=True)
                in_flight.append((part.nbytes, written))
    for _, written in in_flight:
        written.result()


def _layers(shard: Any, stacked: int) -> Iterator[tuple[Index, np.ndarray]]:
    """Yields the layers of a device's part of an array, and where each is in the array."""
    if not stacked:
        yield shard.index, np.asarray(shard.data)
        return
    sizes = (*[1] * stacked, *shard.data.shape[stacked:])
    # The host's own memory is read where it is.
    on_host = np.asarray(shard.data) if shard.device.platform == "cpu" else None
    for place in itertools.product(*map(range, shard.data.shape[:stacked])):
        starts = (*place, *[0] * (shard.data.ndim - stacked))
        first = [part.start or 0 for part in shard.index]
        index = tuple(
            slice(at + start, at + start + size)
            for at, start, size in zip(first, starts, sizes, strict=True)
        )
        if on_host is None:
            yield index, np.asarray(jax.lax.dynamic_slice(shard.data, starts, sizes))
        else:
            yield index, on_host[*place][(np.newaxis,) * stacked]


def _open(folder: Path, name: str, x: jax.Array, stacked: int) -> Any:
    """Opens an array as Orbax has created it, in the folder of this process.

    Only process 0's folder holds its description, so the other processes pass it again.
    """
    part = x.sharding.shard_shape(x.shape)
    chunk = [max(1, size) for size in (*[1] * stacked, *part[stacked:])]
    process = jax.process_index()
    base = {"driver": "file", "path": f"{folder}/ocdbt.process_{process}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": kvstore}
    if process == 0:
        created = open_array(spec, open=True).result()
        written = created.chunk_layout.write_chunk.shape
        assert written == tuple(chunk), (name, created.spec(), chunk)
        return created
    # Zarr knows numpy's own dtypes as <f4 and the like, and bfloat16 by its name.
    dtype = x.dtype.name if x.dtype.kind == "V" else x.dtype.str
    metadata = {"shape": list(x.shape), "chunks": chunk, "dtype": dtype, "compressor": None}
    return open_array(spec | {"metadata": metadata}, open=True, assume_metadata=True).result()
