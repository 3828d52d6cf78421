"""`scan_chunks` and `state_behind`: the state of linear-time mixers, from chunk to chunk."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_arrays
from pallas_kernels.calls import ChunksCall
from pallas_kernels.choose import INTERPRET, VARIANT, choose
from pallas_kernels.counting import is_counted
from pallas_kernels.partition import refuse_checked_vma
from pallas_kernels.recurrence import mosaic, triton, xla
from pallas_kernels.recurrence.chunks import Chunks, call_of

OP = "chunk_scan"
IMPLEMENTATIONS = {"xla": xla, "mosaic": mosaic, "triton": triton}


def scan_chunks(
    chunks: Chunks, state: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Carries a state from chunk to chunk, and reads it for each token.

    For the state S in front of a chunk:

        N = new - erase S,   O = read S + inner N,   S' = decay S + write^T N

    With the arrays of arXiv:2412.06464 this is the gated delta rule, with decays of channels Kimi
    Delta Attention (arXiv:2510.26692), and without `erase` Mamba-2 (arXiv:2405.21060). A chunk in
    which a document starts has `decay` 0, and `erase` and `read` are 0 from that token on. Matmuls
    round their factors to the dtype of `write`; sums and the state are float32.

    Args:
      chunks: the arrays of all chunks, as chunks.py gives their shapes.
      state: float32 [..., k, v], the state in front of the first chunk.
      implementation: a name of IMPLEMENTATIONS, which never falls back; None takes what was
        measured to be fastest here, or else XLA.

    Returns:
      The outputs O, float32 [c, ..., i, v], and the state behind the last chunk.

    Raises:
      ValueError: the arguments do not fit together.
      Refused: the named implementation cannot run this call.
    """
    name = _chosen(chunks, state, implementation)
    return _implementation(name).scan_chunks(chunks, state, name)


def state_behind(
    chunks: Chunks, state: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Returns only the state behind the last chunk; everything else is as in `scan_chunks`."""
    name = _chosen(chunks, state, implementation)
    return _implementation(name).state_behind(chunks, state, name)


def candidates() -> tuple[str, ...]:
    """Returns the names of all implementations, and of their other tilings."""
    return (*IMPLEMENTATIONS, *(f"triton{VARIANT}{name}" for name in triton.VARIANTS))


def order(_: ChunksCall) -> tuple[str, ...]:
    """Returns the implementations of a call, best first, if nothing was measured.

    No GPU has run our kernels yet. Where they are right and faster than XLA, a table
    of measurements says so.
    """
    return ("xla",)


def _chosen(chunks: Chunks, state: jax.Array, implementation: str | None) -> str:
    check_arrays(OP, state=state, **chunks._asdict())
    refuse_checked_vma(OP, state, *chunks)
    _check(chunks, state)
    if is_counted():  # the FLOPs of XLA's matmuls are those of the call
        return "xla"
    call = call_of(chunks)
    refusals = {name: partial(_implementation(name).refusal, call) for name in candidates()}
    return choose(OP, refusals, order(call), implementation, call)


def _check(chunks: Chunks, state: Any) -> None:
    for name, x in (("state", state), *chunks._asdict().items()):
        if x is None and name != "erase":
            raise ValueError(f"{OP}: {name} is an array, not None")
    if chunks.write.ndim < 4 or 0 in chunks.write.shape:
        shape = chunks.write.shape
        raise ValueError(f"{OP}: write must be [c, ..., i, k], none of them 0, not {shape}")
    count, *leading, tokens, keys = chunks.write.shape
    columns = chunks.new.shape[-1]
    decays = 1 if chunks.decay.shape[-1] == 1 else keys
    dtype = chunks.write.dtype
    wanted = {
        "state": ((*leading, keys, columns), jnp.float32),
        "decay": ((count, *leading, decays), jnp.float32),
        "new": ((count, *leading, tokens, columns), jnp.float32),
        "erase": ((count, *leading, tokens, keys), dtype),
        "read": ((count, *leading, tokens, keys), dtype),
        "inner": ((count, *leading, tokens, tokens), dtype),
    }
    for name, (shape, kind) in wanted.items():
        x = state if name == "state" else getattr(chunks, name)
        if x is not None and (x.shape, x.dtype) != (shape, kind):
            raise ValueError(
                f"{OP}: {name} must be {jnp.dtype(kind).name} {shape}, as write "
                f"{chunks.write.shape} has it, not {x.dtype} {x.shape}"
            )


def _implementation(name: str) -> Any:
    return IMPLEMENTATIONS[name.removesuffix(INTERPRET).partition(VARIANT)[0]]
