"""Times the recurrences of linear-time layers, forward and with gradients, by implementation.

How far each is off is the relative distance of its outputs and gradients from those in float32. In
place of an implementation that refuses the GPU stands the reason.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from recurrence_text import KERNELS, LAYERS, Layer, chosen_for, forward, shapes, with_gradients

from pallas_kernels.chosen import using

TOKENS = 8192
TIMED = ("Qwen3.5 27B", "Nemotron 3 Nano")
BOTH = {"": with_gradients, ", forward": forward}
SMALL = Layer(1, 2, 16, 16, corrects=True)
TILINGS = ("triton/narrow", "triton/wide")  # whose forward passes are not timed by themselves


def prepared(dry: bool, timed: Callable[..., float]) -> Callable[[], dict[str, Any]]:
    """Compiles everything, several programs at a time; returns what runs it."""
    layers = {"small": SMALL} if dry else {name: LAYERS[name] for name in TIMED}
    kernels = ("triton:interpret",) if dry else (*KERNELS, *TILINGS)
    lowered: dict[str, Any] = {}
    refused: dict[str, str] = {}
    given: dict[str, tuple] = {}
    for title, layer in layers.items():
        arrays = drawn(layer, 64 if dry else TOKENS)
        wide = jax.tree.map(lambda x: x if x.dtype == bool else x.astype(jnp.float32), arrays)
        with jax.default_matmul_precision("highest"):
            lowered[f"{title}, float32"], _ = _lowered(with_gradients, layer, "xla", wide)
        given[f"{title}, float32"] = wide
        for name in ("xla", *kernels):
            directions = {"": with_gradients} if name in TILINGS else BOTH
            for direction, program in directions.items():
                what = f"{title}, {name}{direction}"
                low, reason = _lowered(program, layer, name, arrays)
                if reason:
                    refused[what] = reason
                    continue
                lowered[what] = low
                given[what] = arrays
    with ThreadPoolExecutor(4) as pool:
        compiled = pool.map(lambda low: low.compile(), lowered.values())
        programs = dict(zip(lowered, compiled, strict=True))

    def run() -> dict[str, Any]:
        found: dict[str, Any] = dict(refused)
        for title in layers:
            reference = f"{title}, float32"
            exact = jax.tree.leaves(programs[reference](*given[reference]))
            for what, program in programs.items():
                if not what.startswith(title) or what == reference:
                    continue
                found[what] = round(1e3 * timed(program, given[what]), 3)
                if not what.endswith("forward"):
                    results = jax.tree.leaves(program(*given[what]))
                    pairs = zip(results, exact, strict=True)
                    found[f"{what} off"] = [float(f"{_distance(*pair):.2g}") for pair in pairs]
        return found

    return run


def drawn(layer: Layer, tokens: int) -> tuple:
    """Returns the arrays that `with_gradients` takes: keys of length 1, and four documents."""
    (q, k, v, decays, rates), state, starts, do, dlast = shapes(layer, tokens)
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.random.normal(next(keys), like.shape, jnp.float32)

    def unit(like: jax.ShapeDtypeStruct) -> jax.Array:
        x = normal(like)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(like.dtype)

    floats = (
        (unit(q) * layer.key_dim**-0.5).astype(q.dtype),
        unit(k),
        normal(v).astype(v.dtype),
        -0.1 * jax.nn.softplus(normal(decays)),
        jax.nn.sigmoid(normal(rates)),
    )
    is_start = jnp.arange(starts.shape[1]) % (tokens // 4 + 1) == 7
    is_start = jnp.broadcast_to(is_start, starts.shape)
    return floats, normal(state), is_start, normal(do).astype(do.dtype), normal(dlast)


def _lowered(
    program: Callable, layer: Layer, implementation: str, arrays: tuple
) -> tuple[Any, str]:
    """Returns the program with the scan by an implementation, and why that does not run here."""
    with using({}) as decisions:
        jax.eval_shape(lambda *arrays: program(layer, *arrays), *arrays)
    with using(chosen_for(decisions.calls, implementation)) as decisions:
        lowered = jax.jit(lambda *arrays: program(layer, *arrays)).lower(*arrays)
    return lowered, "; ".join(decisions.missed.values())


def _distance(x: jax.Array, exact: jax.Array) -> float:
    x, exact = x.astype(jnp.float32), exact.astype(jnp.float32)
    return float(jnp.linalg.norm(x - exact) / jnp.linalg.norm(exact))
