"""Ways to damage the files of a checkpoint, and what one device holds."""

import random
import shutil
from pathlib import Path

import jax
import numpy as np


def files_of(folder: Path) -> list[Path]:
    """Its files that are not empty, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip_bit(folder: Path, draw: random.Random) -> str:
    """Flips one bit of one file: half of the time of one that holds arrays. Returns which."""
    files = files_of(folder)
    arrays = [path for path in files if path.parent.name == "d"]
    path = draw.choice(arrays if arrays and draw.random() < 0.5 else files)
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} of {path.relative_to(folder)}"


def flip_weight(folder: Path, written_by: int | None = None) -> None:
    """Flips a bit in the middle of the largest array of the weights, which only its fingerprint
    protects; `written_by`: of those that this process has written.
    """
    root = folder / "params"
    if written_by is not None:
        root /= f"ocdbt.process_{written_by}"
    arrays = [path for path in files_of(root) if path.parent.name == "d"]
    largest = max(arrays, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def cut(folder: Path, draw: random.Random) -> str:
    """Truncates or deletes one file, or deletes a whole item. Returns what it did."""
    kind = draw.choice(["truncate", "delete", "delete", "item"])
    if kind == "item":
        item = draw.choice(sorted(path for path in folder.iterdir() if path.is_dir()))
        shutil.rmtree(item)
        return f"deleted {item.name}/"
    path = draw.choice(files_of(folder))
    name = path.relative_to(folder)
    if kind == "delete":
        path.unlink()
        return f"deleted {name}"
    size = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    return f"truncated {name} to {size} bytes"


def flip_copy(
    x: jax.Array, device: jax.Device, draw: random.Random, low: bool = False
) -> jax.Array:
    """x with one bit changed where `device` holds it, and nowhere else; `low`: one that hardly
    counts.
    """
    parts = []
    for shard in x.addressable_shards:
        part = np.array(shard.data)
        if shard.device == device:
            raw = part.reshape(-1).view(np.uint8)
            step = part.dtype.itemsize if low else 1  # the lowest byte comes first
            raw[draw.randrange(0, raw.size, step)] ^= 1 << draw.randrange(8)
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
