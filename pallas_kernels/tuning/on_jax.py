"""Runs calls on the device that jax has, for their candidates, arrays, values and times."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import norm
from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention import attention
from pallas_kernels.calls import (
    AttentionCall,
    Call,
    ChunksCall,
    GroupedCall,
    InverseCall,
    LossCall,
    NormCall,
)
from pallas_kernels.choose import INTERPRET, VARIANT, Refused
from pallas_kernels.grouped import api as grouped_api
from pallas_kernels.grouped import grouped_matmul
from pallas_kernels.inverse import api as inverse_api
from pallas_kernels.inverse import unit_inverse
from pallas_kernels.loss import api as loss_api
from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.norm import api as norm_api
from pallas_kernels.recurrence import api as chunks_api
from pallas_kernels.recurrence import scan_chunks
from pallas_kernels.recurrence.cases import chunks_in

DOCUMENTS = 4  # of a sequence with segments, of unequal lengths
HEADS_COMPARED = 2  # key-value heads, of the first and of the last sequence
ROWS_COMPARED = 512  # of arrays without heads, at the start and at the end
CALLS_OF_A_TURN = 5
COTANGENTS = {"dout", "dlse", "dtotal", "dlast"}
APIS = {
    AttentionCall: attention_api,
    NormCall: norm_api,
    GroupedCall: grouped_api,
    LossCall: loss_api,
    ChunksCall: chunks_api,
    InverseCall: inverse_api,
}


class OnJax:
    """The backend that runs every implementation and tiling that does not refuse a call.

    With `interpreted`, kernels are interpreted too: for tests, on any machine.
    """

    def __init__(self, interpreted: bool = False):
        self.interpreted = interpreted

    def describe(self) -> dict[str, Any]:
        """Returns the GPU and its software, for which times are remembered."""
        device = jax.devices()[0]
        return {"gpu": device.device_kind, "jax": jax.__version__}

    def candidates(self, call: Call) -> tuple[list[str], dict[str, str]]:
        """Returns (names, in the fixed order first; name -> why it refuses)."""
        api: Any = APIS[type(call)]
        shapes = jax.eval_shape(partial(_draw, call))
        order = [*api.order(call), *api.candidates()]
        if self.interpreted:
            variant = "double" if isinstance(call, LossCall) else "narrow"
            kernels = ("triton", f"triton{VARIANT}{variant}")
            order += [name + INTERPRET for name in kernels if name in api.candidates()]
        names = []
        refused = {}
        for name in dict.fromkeys(order):
            try:
                jax.eval_shape(partial(_run, call, name), shapes)
            except Refused as error:
                refused[name] = error.reason
            else:
                names.append(name)
        return names, refused

    def prepare(self, call: Call, name: str) -> Callable[[], Any]:
        """Returns the compiled forward and backward pass, whose results stay on the device."""
        arrays = jax.jit(partial(_draw, call))()
        step = jax.jit(partial(_run, call, name)).lower(arrays).compile()
        return partial(step, arrays)

    def values(self, call: Call, run: Callable[[], Any]) -> dict[str, np.ndarray]:
        """Returns the values to compare, in float32: some heads, or some rows."""
        return _compared(call, run())

    def wanted(self, call: Call) -> dict[str, np.ndarray]:
        """Returns the same from the float32 reference: XLA's implementation with exact matmuls."""
        arrays = jax.jit(partial(_draw, call))()
        if isinstance(call, AttentionCall):
            arrays = _slice_heads(call, arrays)
        wide = {
            name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in arrays.items()
        }
        with jax.default_matmul_precision("highest"):
            results = jax.jit(partial(_run, call, "xla"))(wide)
        return _compared(call, results, sliced=True)

    def seconds(self, run: Callable[[], Any]) -> float:
        """Returns the time of a forward and backward pass: the mean of a few, with one wait."""
        start = time.perf_counter()
        out = None
        for _ in range(CALLS_OF_A_TURN):
            out = run()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / CALLS_OF_A_TURN


def _draw(call: Call) -> dict[str, jax.Array]:
    """Returns the arrays of a call, and the gradients of its results."""
    if isinstance(call, AttentionCall):
        return _draw_attention(call)
    if isinstance(call, LossCall):
        return _draw_loss(call)
    if isinstance(call, ChunksCall):
        return _draw_chunks(call)
    if isinstance(call, InverseCall):
        return _draw_inverse(call)
    return _draw_grouped(call) if isinstance(call, GroupedCall) else _draw_norm(call)


def _draw_attention(call: AttentionCall) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    of_q = (call.batch, call.queries, call.heads)
    of_k = (call.batch, call.keys, call.kv_heads)
    shapes = {
        "q": (*of_q, call.head_dim),
        "k": (*of_k, call.head_dim),
        "v": (*of_k, call.value_dim),
        "dout": (*of_q, call.value_dim),
    }
    drawn = {
        name: jax.random.normal(key, shape, jnp.float32).astype(call.dtype)
        for (name, shape), key in zip(shapes.items(), keys[:4], strict=True)
    }
    if call.lse:
        drawn["dlse"] = jax.random.normal(keys[4], of_q, jnp.float32)
    last = call.keys - call.queries  # queries are the last ones, which see most keys
    places = jnp.broadcast_to(jnp.arange(call.keys, dtype=jnp.int32), of_k[:2])
    if call.segments:
        cuts = jnp.array(
            [(call.keys * part * part) // DOCUMENTS**2 for part in range(1, DOCUMENTS)]
        )
        ids = (places[..., None] >= cuts).sum(-1).astype(jnp.int32)
        drawn["q_segments"] = ids[:, max(last, 0) :][:, : call.queries]
        drawn["k_segments"] = ids
    if call.positions:
        drawn["q_positions"] = jnp.broadcast_to(
            jnp.arange(call.queries, dtype=jnp.int32) + last, of_q[:2]
        )
        drawn["k_positions"] = places
    return drawn


def _draw_norm(call: NormCall) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 6)
    block = (call.rows, call.width)
    shapes = {
        "x": (block, call.dtype),
        "scale": (block[1:], call.scale),
        "bias": (block[1:], call.bias),
        "residual": (block, call.residual),
        "dout": (block, call.dtype),
        "dtotal": (block, call.residual),
    }
    return {
        name: jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for (name, (shape, dtype)), key in zip(shapes.items(), keys, strict=True)
        if dtype is not None
    }


def _draw_grouped(call: GroupedCall) -> dict[str, jax.Array]:
    """Draws a call in which all experts have equally many tiles, and none is unused."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {
        "x": (call.rows, call.width),
        "w": (call.experts, call.width, call.out_width),
        "dout": (call.rows, call.out_width),
    }
    drawn = {
        name: jax.random.normal(key, shape, jnp.float32).astype(call.dtype)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    tiles = call.rows // call.tile
    return drawn | {"expert_of_tile": jnp.arange(tiles, dtype=jnp.int32) * call.experts // tiles}


def _draw_loss(call: LossCall) -> dict[str, jax.Array]:
    """Draws a call with about normal logits: weights have the size of trained ones."""
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = (call.batch, call.time)
    x = jax.random.normal(keys[0], (*tokens, call.width), jnp.float32)
    weight = jax.random.normal(keys[1], (call.rows, call.width), jnp.float32)
    return {
        "x": x.astype(call.dtype),
        "weight": (weight * call.width**-0.5).astype(call.weight),
        "targets": jax.random.randint(keys[2], tokens, 0, call.rows, jnp.int32),
        "dout": jnp.ones((1, 1), jnp.float32),
    }


def _draw_chunks(call: ChunksCall) -> dict[str, jax.Array]:
    """Draws chunks that keep a state's size: rows of keys are short, and decays below 1."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    of_chunks = (call.chunks, call.heads)

    def normal(*shape: int, dtype: str = "float32", size: float = 1.0) -> jax.Array:
        return (size * jax.random.normal(next(keys), shape, jnp.float32)).astype(dtype)

    def rows(width: int, length: float = 1.0) -> jax.Array:
        size = length * width**-0.5
        return normal(*of_chunks, call.tokens, width, dtype=call.dtype, size=size)

    decays = (*of_chunks, call.key_dim if call.by_channel else 1)
    drawn = {
        "decay": jax.random.uniform(next(keys), decays, jnp.float32, 0.5, 1.0),
        "write": rows(call.key_dim),
        "new": normal(*of_chunks, call.tokens, call.value_dim),
        "read": rows(call.key_dim),
        "inner": rows(call.tokens),
        "state": normal(call.heads, call.key_dim, call.value_dim),
        "dout": normal(*of_chunks, call.tokens, call.value_dim),
        "dlast": normal(call.heads, call.key_dim, call.value_dim),
    }
    return drawn | ({"erase": rows(call.key_dim, 0.25)} if call.corrects else {})


def _draw_inverse(call: InverseCall) -> dict[str, jax.Array]:
    """Draws matrices whose inverses are no larger than they are."""
    keys = jax.random.split(jax.random.key(0), 2)
    shape = (call.matrices, call.size, call.size)
    lower = jax.random.normal(keys[0], shape, jnp.float32) * call.size**-0.5
    return {
        "lower": jnp.tril(lower, -1),
        "dout": jax.random.normal(keys[1], shape, jnp.float32),
    }


def _run(call: Call, name: str, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns results, and gradients under the names of their arrays with a "d" in front."""
    cotangents = {key: x for key, x in arrays.items() if key in COTANGENTS}
    whole = {key: x for key, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.integer)}
    floating = {key: x for key, x in arrays.items() if key not in cotangents | whole}
    if isinstance(call, AttentionCall):
        forward = partial(_attend, call, name, whole)
    elif isinstance(call, LossCall):
        forward = partial(_compute_loss, call, name, whole)
    elif isinstance(call, GroupedCall):
        forward = partial(_multiply, name, whole)
    elif isinstance(call, ChunksCall):
        forward = partial(_scan, name)
    elif isinstance(call, InverseCall):
        forward = partial(_invert, name)
    else:
        forward = partial(_normalise, call, name)
    out: dict[str, Any]
    out, pull = jax.vjp(forward, floating)
    (gradients,) = pull({key[1:]: x.astype(out[key[1:]].dtype) for key, x in cotangents.items()})
    return out | {f"d{key}": x for key, x in gradients.items()}


def _attend(call, name, whole, floating) -> dict[str, Any]:
    pairs = {}
    for keyword in ("segments", "positions"):
        if f"q_{keyword}" in whole:
            pairs[keyword] = (whole[f"q_{keyword}"], whole[f"k_{keyword}"])
    results = attention(
        floating["q"],
        floating["k"],
        floating["v"],
        window=(call.left, call.right),
        softcap=call.softcap,
        scale=call.scale,
        segment_ids=pairs.get("segments"),
        positions=pairs.get("positions"),
        return_lse=call.lse,
        implementation=name,
    )
    return dict(zip(("out", "lse"), results, strict=True)) if call.lse else {"out": results}


def _normalise(call, name, floating) -> dict[str, Any]:
    results = getattr(norm, call.op)(**floating, implementation=name)
    return dict(zip(("out", "total"), results, strict=True)) if call.residual else {"out": results}


def _multiply(name, whole, floating) -> dict[str, Any]:
    return {"out": grouped_matmul(**floating, **whole, implementation=name)}


def _scan(name, floating) -> dict[str, Any]:
    o, state = scan_chunks(chunks_in(floating), floating["state"], implementation=name)
    return {"out": o, "last": state}


def _invert(name, floating) -> dict[str, Any]:
    return {"out": unit_inverse(floating["lower"], implementation=name)}


def _compute_loss(call, name, whole, floating) -> dict[str, Any]:
    is_reference = floating["x"].dtype != call.dtype
    loss: Any = linear_cross_entropy(
        **floating,
        **whole,
        is_local=call.whole,
        logits_dtype="float32" if is_reference else call.logits,
        implementation=name,
    )
    return {"out": loss[None, None]}


def _slice_heads(call: AttentionCall, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the compared part of a call's arrays: [2 or 1, time, some heads, ...]."""
    batch = sorted({0, call.batch - 1})
    group = call.heads // call.kv_heads
    count = min(HEADS_COMPARED, call.kv_heads)
    sliced = {}
    for name, x in arrays.items():
        x = x[jnp.array(batch)]
        if name in ("k", "v", "dk", "dv"):
            x = x[:, :, :count]
        elif x.ndim > 2:  # queries' heads; ids have none
            x = x[:, :, : count * group]
        sliced[name] = x
    return sliced


def _compared(
    call: Call, results: dict[str, jax.Array], sliced: bool = False
) -> dict[str, np.ndarray]:
    if isinstance(call, AttentionCall):
        results = results if sliced else _slice_heads(call, results)
        rows_last = {}
        for name, x in results.items():
            # [b, t, h, d] -> [b, h, t, d], and [b, t, h] -> [b, h, t, 1]
            rows_last[name] = jnp.moveaxis(x if x.ndim > 3 else x[..., None], 1, 2)
    else:
        rows_last = {name: _some_rows(x.reshape(-1, x.shape[-1])) for name, x in results.items()}
    return {name: np.asarray(x.astype(jnp.float32)) for name, x in rows_last.items()}


def _some_rows(x: jax.Array) -> jax.Array:
    if x.shape[0] <= 2 * ROWS_COMPARED:
        return x
    return jnp.concatenate((x[:ROWS_COMPARED], x[-ROWS_COMPARED:]))
