"""Implements the scan over chunks for NVIDIA's Hopper (sm_90), on Mosaic GPU.

As on Triton there is one kernel forward and one backward, which leave to XLA what sums over value
channels (carried.py). A program owns ROWS value channels of one head, whose state one warpgroup
keeps in registers, in float32, from the first chunk to the last. There the state is transposed: its
value channels are the rows of a wgmma. So the state, and what tokens write to it, are left operands
that never leave the registers. Meanwhile the other warpgroup copies the arrays of the next chunks
into a ring of shared memory, and results are on their way to memory from two places in turn.

Both kernels do the same with a state X, chunk by chunk; backward X is the gradient of the state,
and chunks go from the last to the first:

    Y = add - reader X,   X = decay X + writer^T Y             forward
    Y = add + reader X,   X = decay X + more - writer^T Y      backward

                forward        backward
    add         new            gradient of N
    reader      erase          write
    writer      write          erase
    more                       gradient of the state in front of the chunk
    results     X, Y           X, Y, and the gradient of decay: sums of X S over value channels

Without `erase` Y is `add` forward, and backward the chunk's tokens take nothing from X.

Barriers: `ready[slot]`, for which the computing warpgroup waits: the arrays of a chunk are there;
`free[slot]`, for which the copying one waits: they have been read. Letters as in chunks.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends import mosaic as gpu
from pallas_kernels.backends.rings import Ring, fill_rings
from pallas_kernels.calls import ChunksCall
from pallas_kernels.choose import INTERPRET
from pallas_kernels.recurrence import carried
from pallas_kernels.recurrence.chunks import Chunks

ROWS = 64  # of a wgmma: the value channels of a program
TOKENS = 64  # of a chunk
KEYS = (64, 128)  # channels: what a program has registers and shared memory for
DTYPES = ("bfloat16", "float16")
GRID_LIMIT = 65535  # programs along each dim of a CUDA grid but the first
COMPUTING, COPYING = 0, 1  # warpgroups
SLOTS = {"chunk_scan_forward": 3, "chunk_scan_backward": 2}  # what shared memory has room for
PLACES = 2  # of each result in shared memory
OF_COLUMNS = ("add", "more", "before", "state", "values")  # arrays [..., v]


def refusal(call: ChunksCall, interpreted: bool) -> str:
    if call.dtype not in DTYPES:
        return f"bfloat16 and float16, not {call.dtype}"
    if call.tokens != TOKENS:
        return f"chunks of {TOKENS} tokens, not {call.tokens}"
    if call.key_dim not in KEYS:
        return f"{' or '.join(map(str, KEYS))} key channels, not {call.key_dim}"
    if call.value_dim % ROWS:
        return f"value channels that are a multiple of {ROWS}, not {call.value_dim}"
    if call.heads > GRID_LIMIT:
        return f"up to {GRID_LIMIT} heads of all sequences, not {call.heads}"
    if call.chunks * call.heads * call.key_dim * call.value_dim >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return gpu.refusal(interpreted)


def scan_chunks(chunks: Chunks, state: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Does what `xla.scan_chunks` does."""
    return carried.scan_chunks(KERNELS, chunks, state, name)


def state_behind(chunks: Chunks, state: jax.Array, name: str) -> jax.Array:
    """Does what `xla.state_behind` does."""
    return carried.state_behind(KERNELS, chunks, state, name)


def _forward(name, state_nkv, decay_cnk, write_cnik, new_cniv, erase_cnik):
    arrays = {"decay": decay_cnk, "reader": erase_cnik, "writer": write_cnik, "add": new_cniv}
    last, results = _carry(name, "chunk_scan_forward", state_nkv, arrays, write_cnik.dtype)
    return last, results["state"], results["values"]


def _backward(name, dlast, saved, gradients):  # as carried.Kernels.backward
    decay_cnk, write_cnik, erase_cnik, before, _ = saved
    dbefore, dvalues = gradients
    arrays = {"decay": decay_cnk, "reader": write_cnik, "writer": erase_cnik}
    arrays |= {"add": dvalues, "more": dbefore, "before": before}
    dstate, results = _carry(name, "chunk_scan_backward", dlast, arrays, jnp.float32)
    ddecay_cnk = results["ddecay"].sum(0)
    if decay_cnk.shape[-1] == 1:
        ddecay_cnk = ddecay_cnk.sum(-1, keepdims=True)
    return dstate, ddecay_cnk, results["values"], results["state"]


KERNELS = carried.Kernels(_forward, _backward)


def _carry(name: str, kernel_name: str, start_nkv, arrays: dict[str, Any], values_dtype):
    """Returns the state X behind all chunks, and the results by name.

    The state in front of each chunk has the dtype of its factors, Y has `values_dtype`.
    """
    arrays = {key: x for key, x in arrays.items() if x is not None}
    count, heads, *_ = arrays["decay"].shape
    keys, columns = start_nkv.shape[1:]
    blocks = columns // ROWS
    arrays["decay"] = jnp.broadcast_to(arrays["decay"], (count, heads, keys))
    dtype = arrays["reader" if "reader" in arrays else "writer"].dtype
    results = {
        "state": jax.ShapeDtypeStruct((count, heads, keys, columns), dtype),
        "values": jax.ShapeDtypeStruct(arrays["add"].shape, values_dtype),
    }
    if "before" in arrays:
        results["ddecay"] = jax.ShapeDtypeStruct((blocks, *arrays["decay"].shape), jnp.float32)
    statics = _Statics(
        inputs=tuple(arrays),
        results=tuple(results),
        dtype=dtype,
        slots=SLOTS[kernel_name],
        interpret=name.endswith(INTERPRET),
    )
    run = gpu.call(
        partial(_kernel, statics),
        grid={"block": blocks, "head": heads},
        outputs=[jax.ShapeDtypeStruct(start_nkv.shape, jnp.float32), *results.values()],
        scratch=_scratch(statics, arrays, results),
        warpgroups=2,
        interpret=statics.interpret,
        name=kernel_name,
    )
    end, *written = run(start_nkv, *arrays.values())
    return end, dict(zip(results, written, strict=True))


@dataclass(frozen=True)
class _Statics:
    """The static arguments of a kernel."""

    inputs: tuple[str, ...]  # arrays of chunks
    results: tuple[str, ...]
    dtype: Any  # of the factors of matmuls
    slots: int
    interpret: bool


def _scratch(statics: _Statics, arrays: Mapping[str, Any], results: Mapping[str, Any]) -> list:
    """Returns scratch memory in the order of `_split`."""

    def tiles(count: int, like: Mapping[str, Any]) -> list:
        """Returns memory for a program's part of `count` chunks of each array."""
        shapes = {
            key: (x.shape[-2], ROWS) if key in OF_COLUMNS else x.shape[2 + (key == "ddecay") :]
            for key, x in like.items()
        }
        return [
            gpu.shared_memory((count, *shapes[key]), x.dtype, swizzle_floats=len(shapes[key]) > 1)
            for key, x in like.items()
        ]

    left = []
    if statics.interpret:
        keys = arrays["decay"].shape[-1]
        left = [gpu.shared_memory((ROWS, width), statics.dtype) for width in (keys, TOKENS)]
    return [
        *tiles(statics.slots, arrays),
        *tiles(PLACES, results),
        gpu.barriers(statics.slots, arrivals=len(arrays)),  # ready: a copy each
        gpu.barriers(statics.slots),  # free
        *left,
    ]


@dataclass(frozen=True)
class _Program:
    """A program's part of the arrays and results, whose references go by name."""

    head: Any
    block: Any
    chunks: int
    is_backward: bool
    arrays: Mapping[str, Any]
    slots: Mapping[str, Any]
    results: Mapping[str, Any]
    places: Mapping[str, Any]
    ring: Ring
    left: list[Any]  # for left operands of X and Y, if interpreted

    @property
    def columns(self):
        return pl.ds(self.block * ROWS, ROWS)

    def copy(self, step, slot, ready) -> None:
        """Copies the arrays of a chunk into a slot."""
        for name, ref in self.arrays.items():
            gpu.copy_gmem_to_smem(self._part(name, ref, step), self.slots[name].at[slot], ready)

    def put(self, step, values: Mapping[str, jax.Array]) -> None:
        """Writes results of a chunk, transposed if they are matrices, to their places and on to
        memory.
        """
        place = jax.lax.rem(step, PLACES)
        for name, value in values.items():
            own = self.places[name].at[place]
            if name in OF_COLUMNS:
                gpu.store_transposed(own, value.astype(own.dtype))
            else:
                own[...] = value
        gpu.commit_smem()
        for name in values:
            into = self._part(name, self.results[name], step)
            gpu.copy_smem_to_gmem(self.places[name].at[place], into)

    def _part(self, name: str, ref, step):
        """Returns this program's part of a chunk."""
        chunk = self.chunks - 1 - step if self.is_backward else step
        if name in OF_COLUMNS:
            return ref.at[chunk, self.head, :, self.columns]
        return (
            ref.at[self.block, chunk, self.head] if name == "ddecay" else ref.at[chunk, self.head]
        )


def _kernel(statics: _Statics, *refs):
    start_ref, end_ref, program = _split(statics, list(refs))
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == COPYING)
    def _():
        fill_rings(program.chunks, (program.ring, program.copy))

    @pl.when(warpgroup == COMPUTING)
    def _():
        at = (program.head, slice(None), program.columns)
        state = gpu.load_transposed(start_ref.at[at], optimized=False)
        visit = partial(_visit, statics, program)
        state = jax.lax.fori_loop(0, program.chunks, visit, state)
        gpu.store_transposed(end_ref.at[at], state)
        gpu.wait_smem_to_gmem(0)


def _split(statics: _Statics, refs: list[Any]):
    """Returns the references to the first and the last state, and those of the program."""

    def named(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: refs.pop(0) for name in names}

    start_ref, arrays = refs.pop(0), named(statics.inputs)
    end_ref, results = refs.pop(0), named(statics.results)
    slots, places = named(statics.inputs), named(statics.results)
    program = _Program(
        head=jax.lax.axis_index("head"),
        block=jax.lax.axis_index("block"),
        chunks=arrays["decay"].shape[0],
        is_backward="more" in arrays,
        arrays=arrays,
        slots=slots,
        results=results,
        places=places,
        ring=Ring(statics.slots, ready=refs.pop(0), free=refs.pop(0)),
        left=refs,
    )
    return start_ref, end_ref, program


def _visit(statics: _Statics, program: _Program, step, state):
    """Returns the state behind a chunk, and writes the results of the chunk."""
    ring = program.ring
    gpu.barrier_wait(ring.ready_at(step))
    slot = {name: ref.at[ring.slot(step)] for name, ref in program.slots.items()}
    narrow = state.astype(statics.dtype)

    def put_state():
        # Only the writes of the last chunk may still be under way: they have the other places.
        gpu.wait_smem_to_gmem(len(program.places), wait_read_only=True)
        program.put(step, {"state": narrow})

    def wide(name: str) -> jax.Array:
        return gpu.load_transposed(slot[name]).astype(jnp.float32)

    def left_operand(x: jax.Array, number: int):
        staging = program.left[number] if statics.interpret else None
        return gpu.left_operand(x, staging, statics.interpret)

    values = wide("add")
    if "reader" in slot:
        left = left_operand(narrow, 0)
        product = gpu.accumulate_from_zero(
            lambda into: gpu.wgmma(into, left, slot["reader"].T), (ROWS, TOKENS), put_state
        )
        values = values + product if program.is_backward else values - product
    else:
        put_state()
    results = {"values": values}
    decays = gpu.broadcast(gpu.load_shared_vector(slot["decay"], 1), state.shape, 1)
    if program.is_backward:
        results["ddecay"] = (state * wide("before")).sum(0)
        state = decays * state + wide("more")
    else:
        state = decays * state
    # It also waits until all that was loaded is read: the slot's next copy goes another way to
    # shared memory.
    program.put(step, results)
    if "writer" in slot:
        written = -values if program.is_backward else values
        left = left_operand(written.astype(statics.dtype), 1)
        [state] = gpu.accumulate_onto(
            (state,), lambda into: gpu.wgmma(into, left, slot["writer"]), statics.interpret
        )
    gpu.barrier_arrive(ring.free.at[ring.slot(step)])
    return state
