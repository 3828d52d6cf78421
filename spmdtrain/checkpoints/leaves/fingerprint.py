"""Fingerprints of arrays, which prove that a checkpoint is read back as it was written.

The fingerprint of an array is two sums over its elements, modulo 2^32, of `mixed(bits, index)`: the
bits of the element, mixed with its row-major index in the whole array.

- The order of the terms does not matter, so every sharding and every number of processes gives the
  same fingerprint, and each device reads only what it holds.
- For a given index `mixed` is a bijection of the bits. So a change to one element, in one bit or
  many, always changes both sums.
- If several elements change, a sum misses it with probability 2^-32, as for random terms. The two
  sums are mixed differently: both miss it with probability 2^-64.

The mixing steps are those of the finaliser of MurmurHash3 (Appleby, public domain), applied after
an odd factor has spread the index over the word.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.axes import axes_of_dim
from spmdtrain.parallel.host import on_device
from spmdtrain.parallel.regions import manual_region
from spmdtrain.processes.xla_flags import runs_on_gpus

Fingerprint = tuple[int, int]

# For each of the two sums: the factor of the index, and the two factors of the mixing. All are odd,
# and so bijections modulo 2^32.
FACTORS = (
    (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35),
    (0x7FEB352D, 0x2C1B3C6D, 0x297A2D39),
)
CHUNK = 1 << 16  # elements that numpy mixes per pass: they stay in the cache of a core
BLOCK = 1 << 20  # elements that a device mixes at once: 4 MiB of words
# Elements of an array that is copied: to the host, or to be stacked with others of its kind.
SMALL = 1 << 16


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, Fingerprint]:
    """Returns the fingerprint of each array, by its name.

    Large arrays, and those of which this process holds only a part, are summed on their devices, in
    one program. Small ones are read by the host, which compiles nothing, and the arrays of a single
    CPU device share one program. All processes that hold
    parts of the arrays must call this, and all get the same result. Waits for the devices.
    """
    near = {name: x for name, x in arrays.items() if x.is_fully_addressable and x.size <= SMALL}
    far = {name: x for name, x in arrays.items() if name not in near}
    whole = {name: x for name, x in far.items() if _is_whole_on_host(x)}
    start = begin({name: _as_integers(x) for name, x in far.items() if name not in whole})
    of_whole = {
        name: _by_blocks(np.asarray(x), *x.sharding.device_set) for name, x in whole.items()
    }
    return {name: fingerprint(x) for name, x in jax.device_get(near).items()} | of_whole | start()


def _is_whole_on_host(x: jax.Array) -> bool:
    platforms = [device.platform for device in x.sharding.device_set]
    return x.is_fully_addressable and platforms == ["cpu"]


def _as_integers(x: jax.Array) -> jax.Array:
    """Returns the same bytes as numbers that XLA for CPU reads block by block.

    It would first copy a whole array of 16-bit numbers. Other devices would not, and keep theirs.
    The result shares its memory with x, which must not be donated meanwhile.
    """
    devices = x.sharding.addressable_devices
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    if not is_narrow or any(device.platform != "cpu" for device in devices):
        return x
    parts = [
        jax.device_put(np.asarray(part.data).view(np.uint16), part.device)
        for part in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def begin(arrays: Mapping[str, jax.Array]) -> Callable[[], dict[str, Fingerprint]]:
    """Starts computing the fingerprints of arrays. Returns a function that waits for them.

    The arrays may be donated as soon as this returns.
    """
    if not arrays:
        return dict
    names = sorted(arrays)
    shardings = [arrays[name].sharding for name in names]
    mesh = getattr(shardings[0], "mesh", None)
    specs = tuple(getattr(sharding, "spec", P()) for sharding in shardings)
    sums = _program(mesh, specs)([arrays[name] for name in names])

    def read() -> dict[str, Fingerprint]:
        return {
            name: (int(a), int(b)) for name, (a, b) in zip(names, np.asarray(sums), strict=True)
        }

    return read


def fingerprint(x: np.ndarray, first: int = 0) -> Fingerprint:
    """Returns the same fingerprint for a numpy array, computed on the host.

    For a part of an array, whose elements are contiguous from index `first` on, it is their
    contribution to the fingerprint of the whole; see `added`.
    """
    words = _host_words(x)
    totals = [0, 0]
    spare = np.empty((3, min(CHUNK, words.size)), np.uint32)
    for start in range(0, words.size, CHUNK):
        part = words[start : start + CHUNK]
        word, *scratch = spare[:, : part.size]
        word[...] = part
        for number in range(len(FACTORS)):
            totals[number] += _sum_of(word, first + start, number, scratch)
    first, second = (total % 2**32 for total in totals)
    return first, second


def _host_words(x: np.ndarray) -> np.ndarray:
    """Returns the bits of an array in order, as integers of at most 32 bits."""
    words = np.ascontiguousarray(x).reshape(-1)
    return words.view(np.uint32 if words.itemsize == 8 else f"uint{8 * words.itemsize}")


def host_fingerprint(x: np.ndarray, first: int = 0) -> Fingerprint:
    """Returns `fingerprint(x, first)`. XLA computes that of a large array, three times as fast.

    numpy computes it where starting jax would look for GPUs or wait for other processes.
    """
    if x.size < BLOCK or runs_on_gpus() or jax.distributed.is_initialized():
        return fingerprint(x, first)
    return _by_blocks(x, jax.local_devices()[0], first)


def _by_blocks(x: np.ndarray, device: jax.Device, first: int = 0) -> Fingerprint:
    """Returns `fingerprint(x, first)`, computed by a device that is the host.

    It takes blocks of the words, in order: one program for arrays of every shape. Blocks that
    start at a cache line are read where they are, and others are copied.
    """
    words = _host_words(x)
    end = words.size - words.size % BLOCK
    sums = [
        _sums_of_block(
            jax.device_put(words[start : start + BLOCK], device, may_alias=True),
            np.uint32((first + start) % 2**32),
        )
        for start in range(0, end, BLOCK)
    ]
    of_blocks = [(int(one), int(other)) for one, other in jax.device_get(sums)]
    return added([*of_blocks, fingerprint(words[end:], first + end)])


@jax.jit
def _sums_of_block(words: jax.Array, first: jax.Array) -> jax.Array:
    """Returns the two sums over words that are contiguous from the index `first` on."""
    return _sums_at_once(words, first, (1,))


def _sum_of(word: np.ndarray, first: int, number: int, scratch: Sequence[np.ndarray]) -> int:
    """Returns the sum of `mixed` over the words of a chunk, whose first has the index `first`.

    It is computed within two arrays of the chunk's size: fresh ones would take twice the time.
    """
    term, shifted = scratch
    spread, *factors = FACTORS[number]
    steps = _spread_indices(CHUNK)[number][: word.size]
    np.add(steps, np.uint32(first * spread % 2**32), out=term)
    np.bitwise_xor(term, word, out=term)
    for shift, factor in zip((16, 13), factors, strict=True):
        np.right_shift(term, np.uint32(shift), out=shifted)
        np.bitwise_xor(term, shifted, out=term)
        np.multiply(term, np.uint32(factor), out=term)
    np.right_shift(term, np.uint32(16), out=shifted)
    np.bitwise_xor(term, shifted, out=term)
    return int(np.add.reduce(term, dtype=np.uint32))


@functools.cache
def _spread_indices(size: int) -> list[np.ndarray]:
    """Returns the indices 0 to size - 1 times the factor that spreads them, for each of the
    sums.
    """
    index = np.arange(size, dtype=np.uint32)
    return [index * np.uint32(spread) for spread, *_ in FACTORS]


def added(parts: Iterable[Fingerprint]) -> Fingerprint:
    """Returns the fingerprint of an array, given those of its parts."""
    first, second = (sum(of_sum) % 2**32 for of_sum in zip((0, 0), *parts, strict=True))
    return first, second


@functools.cache
def _program(mesh: Mesh | None, specs: tuple[P, ...]) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns the jitted `arrays -> uint32 [arrays, 2]`, whose result is replicated over `mesh`.

    Each device sums what it holds; one reduction over the mesh then adds the sums of all arrays.
    """
    if mesh is None:
        return jax.jit(lambda arrays: sums_of_each(arrays, None, specs))
    copied = [replica_axes(mesh, spec) for spec in specs]
    kinds = sorted(set(copied))
    kind_of = np.array([kinds.index(axes) for axes in copied])

    def local(arrays: list[jax.Array]) -> jax.Array:
        is_first = [all_zero([lax.axis_index(axis) for axis in axes]) for axes in kinds]
        counts = jnp.stack(is_first).astype(jnp.uint32)[kind_of]  # one of the copies counts
        sums = sums_of_each(arrays, mesh, specs)
        return lax.psum(counts[:, None] * sums, mesh.axis_names)

    return jax.jit(manual_region(local, mesh, mesh.axis_names, (list(specs),), P()))


def all_zero(indices: Sequence[jax.Array]) -> jax.Array:
    """Returns True, as a traced bool, if all of these scalars are 0 or if there are none."""
    return functools.reduce(jnp.logical_and, [index == 0 for index in indices], jnp.bool_(True))


def replica_axes(mesh: Mesh, spec: P) -> tuple[str, ...]:
    """Returns the mesh axes along which devices hold copies of an array sharded as `spec`."""
    named = {axis for part in spec for axis in axes_of_dim(part)}
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in named)


def sums_of_each(arrays: Sequence[jax.Array], mesh: Mesh | None, specs: Sequence[P]) -> jax.Array:
    """Returns `local_sums` of each array, uint32 [arrays, 2].

    Small arrays of one shape, dtype and spec are stacked and summed at once: the program of a model
    compiles in a third of the time.
    """
    arrays = [on_device(x) for x in arrays]
    alike: dict[Any, list[int]] = {}
    for place, (x, spec) in enumerate(zip(arrays, specs, strict=True)):
        kind = (x.shape, x.dtype, spec) if x.size <= SMALL else place
        alike.setdefault(kind, []).append(place)
    sums = []
    for places in alike.values():
        of_one = functools.partial(local_sums, mesh=mesh, spec=specs[places[0]])
        these = [arrays[place] for place in places]
        alone = len(these) == 1
        sums.append(of_one(these[0])[None] if alone else jax.vmap(of_one)(jnp.stack(these)))
    order = np.concatenate(list(alike.values()))
    return jnp.concatenate(sums)[np.argsort(order)]


def local_sums(x: jax.Array, mesh: Mesh | None = None, spec: P | None = None) -> jax.Array:
    """Returns the two sums over the elements of one array that this device holds, uint32 [2].

    With `mesh`, it must be called in a region that is manual over all axes of the mesh; x is then
    the device's part of an array sharded as `spec`. Elements are mixed with their index in the
    whole array.
    """
    split = spec or P()
    parts = [*split, *[None] * (x.ndim - len(split))]
    first = jnp.uint32(0)
    stride = _words_of(x)
    strides = []
    for dim in reversed(range(x.ndim)):
        axes = axes_of_dim(parts[dim]) if mesh is not None else ()
        pieces = math.prod(mesh.shape[axis] for axis in axes) if mesh is not None else 1
        if pieces > 1:
            start = lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(x.shape[dim])
            first += start * jnp.uint32(stride % 2**32)
        strides.insert(0, stride)
        stride *= x.shape[dim] * pieces
    # Integers, because XLA for CPU would widen all of a bfloat16 array before it cuts a block.
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2:
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return _sums(x, first, strides)


def _sums(x: jax.Array, first: jax.Array, strides: Sequence[int]) -> jax.Array:
    """Returns the two sums of an array whose first element has the index `first`, uint32 [2].

    `strides` are the steps of the index along each dim. A large array is summed block by block: XLA
    for CPU would hold the mixed words of all of it.
    """
    if x.size <= BLOCK:
        return _sums_at_once(x, first, strides)
    block = _block_of(x.shape)
    counts = tuple(size // part for size, part in zip(x.shape, block, strict=True))

    def of_block(number: jax.Array | int) -> jax.Array:
        places = jnp.unravel_index(jnp.asarray(number), counts)
        starts = [place * part for place, part in zip(places, block, strict=True)]
        index = first
        for start, stride in zip(starts, strides, strict=True):
            index = index + start.astype(jnp.uint32) * jnp.uint32(stride % 2**32)
        return _sums_at_once(lax.dynamic_slice(x, starts, block), index, strides)

    return lax.fori_loop(1, math.prod(counts), lambda i, sums: sums + of_block(i), of_block(0))


def _block_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a block, of at most BLOCK elements: each dim divides the array's."""
    block: list[int] = []
    room = BLOCK
    for size in reversed(shape):
        largest = next(part for part in range(min(size, room), 0, -1) if size % part == 0)
        block.insert(0, largest)
        room //= largest
    return tuple(block)


def _sums_at_once(x: jax.Array, first: jax.Array, strides: Sequence[int]) -> jax.Array:
    words = _words(x)
    index = first
    for dim, stride in enumerate((*strides, 1)[: words.ndim]):
        along = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        index = index + along * jnp.uint32(stride % 2**32)
    terms = [mixed(words, index, *map(jnp.uint32, factors)) for factors in FACTORS]
    return jnp.stack([jnp.sum(of_sum, dtype=jnp.uint32) for of_sum in terms])


def _words_of(x: jax.Array) -> int:
    """Returns the number of 32-bit words of an element; if there are two, `_words` adds a last
    dim.
    """
    return 2 if x.dtype.itemsize == 8 else 1


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as uint32; a 64-bit element gives two words."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return bits.astype(jnp.uint32)


def mixed(word: Any, index: Any, spread: Any, first: Any, second: Any) -> Any:
    """Mixes words with their indices, modulo 2^32; a bijection of the word."""
    word = word ^ (index * spread)
    word = (word ^ (word >> np.uint32(16))) * first
    word = (word ^ (word >> np.uint32(13))) * second
    return word ^ (word >> np.uint32(16))
