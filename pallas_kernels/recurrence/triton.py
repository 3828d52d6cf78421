"""Implements the scan over chunks on Triton: one kernel forward, one backward.

A program owns a block of value channels of one head, whose state stays in its registers from the
first chunk to the last; backward, the gradient of the state does, from the last to the first. What
sums over value channels, so over programs, is left to XLA (carried.py). So there are no atomics,
and every sum has a fixed order.

Forward, a chunk's tokens write N = new - erase S, and S' = decay S + write^T N. Backward, with the
gradient D of S':

    dN += write D,   dnew = dN,   ddecay = sum of D S,   dS += decay D - erase^T dN

States and N are written in the dtype of `write`, to which every matmul rounds them; sums, decays
and the state that goes on are float32.

Letters as in chunks.py. Blocks are powers of two, and masks cut off the excess.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.triton import (
    LEAST_DOT,
    call,
    dot_on_tensor_cores,
    load_masked,
    next_power_of_two,
    store_masked,
)
from pallas_kernels.calls import ChunksCall
from pallas_kernels.choose import INTERPRET, VARIANT, no_64_bits, no_gpu
from pallas_kernels.recurrence import carried
from pallas_kernels.recurrence.chunks import Chunks

DTYPES = ("bfloat16", "float16", "float32")
# By the bytes of an element, what a program has registers for: key channels, value channels.
WIDEST = {2: 256, 4: 128}
LARGEST_COLUMNS = {2: 64, 4: 16}
# Value channels of a program: few, so that one sequence of a few dozen heads fills a GPU.
COLUMNS = 32
# Others, which are tried when kernels are measured: "triton/narrow".
VARIANTS = {"narrow": COLUMNS // 2, "wide": 2 * COLUMNS}


def refusal(call: ChunksCall, interpreted: bool) -> str:
    if call.dtype not in DTYPES:
        return f"16-bit floats or float32, not {call.dtype}"
    if call.tokens < LEAST_DOT or call.tokens & (call.tokens - 1):
        return f"chunks of a power of 2 of at least {LEAST_DOT} tokens, not {call.tokens}"
    widest = WIDEST[jnp.dtype(call.dtype).itemsize]
    if call.key_dim > widest:
        return f"up to {widest} key channels in {call.dtype}, not {call.key_dim}"
    if call.chunks * call.heads * _largest(call) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return no_64_bits() or no_gpu(interpreted)


def scan_chunks(chunks: Chunks, state: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Does what `xla.scan_chunks` does."""
    return carried.scan_chunks(KERNELS, chunks, state, name)


def state_behind(chunks: Chunks, state: jax.Array, name: str) -> jax.Array:
    """Does what `xla.state_behind` does."""
    return carried.state_behind(KERNELS, chunks, state, name)


def _forward(name, state_nkv, decay_cnk, write_cnik, new_cniv, erase_cnik):
    sizes = _sizes(name, decay_cnk, write_cnik, new_cniv)
    specs = _Specs(sizes)
    dtype = write_cnik.dtype
    c, n, i, v = new_cniv.shape
    run = call(
        partial(_forward_kernel, sizes, _dot_of(name)),
        grid=sizes.grid,
        inputs=[
            specs.state,
            specs.decay,
            specs.keys,
            specs.values,
            None if erase_cnik is None else specs.keys,
        ],
        outputs=[
            (jax.ShapeDtypeStruct(state_nkv.shape, jnp.float32), specs.state),
            (jax.ShapeDtypeStruct((c, *state_nkv.shape), dtype), specs.states),
            (jax.ShapeDtypeStruct((c, n, i, v), dtype), specs.values),
        ],
        **_options(name, dtype),
        name="chunk_scan_forward",
    )
    return tuple(run(state_nkv, decay_cnk, write_cnik, new_cniv, erase_cnik))


def _backward(name, dlast, saved, gradients):  # as carried.Kernels.backward
    decay_cnk, write_cnik, erase_cnik, before, values = saved
    dbefore, dvalues = gradients
    sizes = _sizes(name, decay_cnk, write_cnik, values)
    specs = _Specs(sizes)
    dtype = write_cnik.dtype
    of_decay = jax.ShapeDtypeStruct((sizes.grid[1], *decay_cnk.shape), jnp.float32)
    run = call(
        partial(_backward_kernel, sizes, _dot_of(name)),
        grid=sizes.grid,
        inputs=[
            specs.state,
            specs.decay,
            specs.keys,
            None if erase_cnik is None else specs.keys,
            specs.states,
            specs.states,
            specs.values,
        ],
        outputs=[
            (jax.ShapeDtypeStruct(dlast.shape, jnp.float32), specs.state),
            (jax.ShapeDtypeStruct(values.shape, jnp.float32), specs.values),
            (jax.ShapeDtypeStruct(before.shape, dtype), specs.states),
            (of_decay, specs.parts_of_decay),
        ],
        **_options(name, dtype),
        name="chunk_scan_backward",
    )
    dstate, dnew, dafter, ddecay = run(
        dlast, decay_cnk, write_cnik, erase_cnik, before, dbefore, dvalues
    )
    return dstate, ddecay.sum(0), dnew, dafter


KERNELS = carried.Kernels(_forward, _backward)


class _Sizes(NamedTuple):
    chunks: int
    heads: int
    tokens: int
    keys: int
    columns: int  # value channels
    decays: int  # 1, or as many as keys
    block_keys: int
    block_columns: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.heads, pl.cdiv(self.columns, self.block_columns)

    @property
    def block_decays(self) -> int:
        return 1 if self.decays == 1 else self.block_keys


def _sizes(name: str, decay_cnk, write_cnik, new_cniv) -> _Sizes:
    c, n, i, k = write_cnik.shape
    v = new_cniv.shape[-1]
    variant = name.removesuffix(INTERPRET).partition(VARIANT)[2]
    largest = LARGEST_COLUMNS[write_cnik.dtype.itemsize]
    columns = min(VARIANTS.get(variant, COLUMNS), largest, next_power_of_two(v))
    return _Sizes(c, n, i, k, v, decay_cnk.shape[-1], next_power_of_two(k), columns)


class _Specs:
    """The part of each array that the program of head n and columns j has."""

    def __init__(self, sizes: _Sizes):
        c, i, k, v = sizes.chunks, sizes.tokens, sizes.block_keys, sizes.block_columns
        of_decay = (c, None, sizes.block_decays)
        self.state = pl.BlockSpec((None, k, v), lambda n, j: (n, 0, j))
        self.states = pl.BlockSpec((c, None, k, v), lambda n, j: (0, n, 0, j))
        self.keys = pl.BlockSpec((c, None, i, k), lambda n, _: (0, n, 0, 0))
        self.values = pl.BlockSpec((c, None, i, v), lambda n, j: (0, n, 0, j))
        self.decay = pl.BlockSpec(of_decay, lambda n, _: (0, n, 0))
        self.parts_of_decay = pl.BlockSpec((None, *of_decay), lambda n, j: (j, 0, n, 0))


def _options(name: str, dtype) -> dict[str, Any]:
    """Returns warps, the stages of the pipeline, and whether the kernel is interpreted."""
    return {
        "warps": 4,
        "stages": 2 if dtype.itemsize == 2 else 1,
        "interpret": name.endswith(INTERPRET),
    }


def _dot_of(name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return partial(dot_on_tensor_cores, interpret=name.endswith(INTERPRET))


class _Masks:
    """The parts of a program's blocks that exist; None: all of it."""

    def __init__(self, sizes: _Sizes):
        start = pl.program_id(1) * sizes.block_columns
        columns = _below(sizes.columns, sizes.block_columns, start)
        keys = _below(sizes.keys, sizes.block_keys)
        self.state = _both(keys, columns, (sizes.block_keys, sizes.block_columns))
        self.keys = _both(None, keys, (sizes.tokens, sizes.block_keys))
        self.values = _both(None, columns, (sizes.tokens, sizes.block_columns))
        self.decay = keys if sizes.decays > 1 else None


def _below(size: int, block: int, start: Any = 0) -> jax.Array | None:
    return None if size % block == 0 else start + jnp.arange(block) < size


def _both(rows, columns, shape: tuple[int, int]) -> jax.Array | None:
    if rows is None and columns is None:
        return None
    if rows is None:
        return jnp.broadcast_to(columns[None], shape)
    if columns is None:
        return jnp.broadcast_to(rows[:, None], shape)
    return rows[:, None] & columns[None]


def _forward_kernel(sizes: _Sizes, dot: Callable, *refs):
    state_ref, decay_ref, write_ref, new_ref, erase_ref, last_ref, before_ref, values_ref = refs
    mask = _Masks(sizes)
    dtype = write_ref.dtype

    def turn(c, state):
        narrow = state.astype(dtype)
        store_masked(before_ref.at[c], narrow, mask.state)
        values = load_masked(new_ref.at[c], mask.values)
        if erase_ref is not None:
            values -= dot(load_masked(erase_ref.at[c], mask.keys), narrow)
        values = values.astype(dtype)
        store_masked(values_ref.at[c], values, mask.values)
        written = dot(load_masked(write_ref.at[c], mask.keys).T, values)
        return _decay(sizes, decay_ref, c, mask) * state + written

    state = load_masked(state_ref, mask.state)
    store_masked(last_ref, jax.lax.fori_loop(0, sizes.chunks, turn, state), mask.state)


def _backward_kernel(sizes: _Sizes, dot: Callable, *refs):
    dlast_ref, decay_ref, write_ref, erase_ref, before_ref, dbefore_ref, dvalues_ref = refs[:7]
    dstate_ref, dnew_ref, dafter_ref, ddecay_ref = refs[7:]
    mask = _Masks(sizes)
    dtype = write_ref.dtype

    def turn(number, dafter):
        c = sizes.chunks - 1 - number
        narrow = dafter.astype(dtype)
        store_masked(dafter_ref.at[c], narrow, mask.state)
        dvalues = load_masked(dvalues_ref.at[c], mask.values).astype(jnp.float32)
        dvalues += dot(load_masked(write_ref.at[c], mask.keys), narrow)
        store_masked(dnew_ref.at[c], dvalues, mask.values)
        before = load_masked(before_ref.at[c], mask.state).astype(jnp.float32)
        _store_decay(sizes, ddecay_ref, c, (dafter * before).sum(1), mask)
        dstate = _decay(sizes, decay_ref, c, mask) * dafter
        dstate += load_masked(dbefore_ref.at[c], mask.state).astype(jnp.float32)
        if erase_ref is not None:
            dstate -= dot(load_masked(erase_ref.at[c], mask.keys).T, dvalues.astype(dtype))
        return dstate

    dlast = load_masked(dlast_ref, mask.state)
    store_masked(dstate_ref, jax.lax.fori_loop(0, sizes.chunks, turn, dlast), mask.state)


def _decay(sizes: _Sizes, decay_ref, c, mask: _Masks) -> jax.Array:
    """Returns the decay of chunk c, to be multiplied by a state [k, v]."""
    if sizes.decays == 1:
        return decay_ref[c, 0]
    return load_masked(decay_ref.at[c], mask.decay)[:, None]


def _store_decay(sizes: _Sizes, ddecay_ref, c, by_key: jax.Array, mask: _Masks) -> None:
    if sizes.decays == 1:
        ddecay_ref[c, 0] = by_key.sum()
    else:
        store_masked(ddecay_ref.at[c], by_key, mask.decay)


def _largest(call: ChunksCall) -> int:
    """Returns the elements of the largest array, for a head and chunk."""
    wide = max(call.key_dim, call.value_dim)
    return max(call.tokens * wide, call.key_dim * call.value_dim)
