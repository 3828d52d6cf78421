"""What the layers that mix tokens in linear time cost, on a CPU: over the length, and by chunks
against token by token.

Costs are processor seconds of a value and its gradients, so that other work on the machine matters
little, and bytes are those that XLA sets aside beside inputs and outputs.

    python benchmarks/linear_layers.py [--tokens 4096 65536] [--json FILE]
"""

import argparse
import json
import os
import resource
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax, which reads it once
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config import RunConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mixers.gated_convolution import ConvMixer
from spmdtrain.models.layers.mixers.gated_delta import DeltaMixer
from spmdtrain.models.layers.mixers.recurrence import Tokens, recur
from spmdtrain.models.layers.mixers.state_space import SsdMixer

EMBED, HEADS, WIDTH = 256, 4, 64
STATE = (1, 2, 2, WIDTH, WIDTH)
MIXERS: dict[str, tuple[type[nnx.Module], dict[str, Any]]] = {
    "delta": (
        DeltaMixer,
        {"key_heads": 2, "value_heads": HEADS, "key_dim": WIDTH, "value_dim": WIDTH},
    ),
    "ssd": (SsdMixer, {"heads": HEADS, "groups": 2, "head_dim": WIDTH, "state": WIDTH}),
    "conv": (ConvMixer, {}),
}


def processor_seconds(function: Callable[[], Any]) -> float:
    """Returns the processor seconds of a call, of all threads."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    jax.block_until_ready(function())
    return spent() - before


def measured(function: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Returns (processor seconds, MiB set aside) of a jitted function, called once before."""
    program = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(program(*arguments))
    seconds = min(processor_seconds(lambda: program(*arguments)) for _ in range(2))
    return seconds, program.memory_analysis().temp_size_in_bytes / 2**20


def layer_costs(name: str, tokens: int) -> dict[str, Any]:
    """Returns the costs of the gradients of one layer, for one sequence of so many tokens."""
    kind, sizes = MIXERS[name]
    table = {"embed": EMBED, "mixers": [name], name: sizes}
    config = RunConfig.model_validate({"model": {"name": "llama", **table}}).model
    with nnx.use_eager_sharding(False):
        make: Any = kind
        graphdef, weights = nnx.split(make(config, nnx.Rngs(0)))
    x_bte = jax.random.normal(jax.random.key(0), (1, tokens, EMBED))

    def loss(weights: nnx.State, x_bte: jax.Array) -> jax.Array:
        layer: Any = nnx.merge(graphdef, weights)
        ctx = ForwardContext(jnp.zeros(x_bte.shape[:2], jnp.int32))
        return jnp.square(layer(x_bte, ctx)[0]).sum()

    seconds, mib = measured(jax.grad(loss, (0, 1)), weights, x_bte)
    return {
        "layer": name,
        "tokens": tokens,
        "us_per_token": 1e6 * seconds / tokens,
        "kib_per_token": 1024 * mib / tokens,
    }


def by_tokens(tokens: Tokens, state: jax.Array, *, corrects: bool) -> tuple[jax.Array, jax.Array]:
    """Returns what `recur` returns, one token after another."""

    def step(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
        state = jnp.where(token.starts[:, None, None, None, None], 0, state)
        state = state * jnp.exp(token.log_decay)[..., None]
        new = token.v - jnp.einsum("bhrkv,bhk->bhrv", state, token.k) if corrects else token.v
        state = state + jnp.einsum("bhk,bhrv->bhrkv", token.k, token.rate[..., None] * new)
        return state, jnp.einsum("bhrkv,bhk->bhrv", state, token.q)

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    state, o = jax.lax.scan(step, state, by_time)
    return jnp.moveaxis(o, 0, 1), state


def drawn_tokens(kind: str, count: int) -> Tokens:
    """Returns tokens whose decays are of heads, or of channels if `kind` says so."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    draw = partial(jax.random.normal, shape=(1, count, 2, WIDTH))
    channels = WIDTH if kind == "channel" else 1
    return Tokens(
        q=draw(next(keys)) / WIDTH,
        k=draw(next(keys)) / WIDTH**0.5,
        v=jax.random.normal(next(keys), (1, count, 2, 2, WIDTH)),
        log_decay=-jax.random.uniform(next(keys), (1, count, 2, 2, channels)),
        rate=jax.random.uniform(next(keys), (1, count, 2, 2)),
        starts=jnp.zeros((1, count), bool),
    )


def chunk_costs(kind: str, count: int) -> dict[str, Any]:
    """Returns how many times the costs of chunks those of single tokens are, for gradients."""
    tokens, state = drawn_tokens(kind, count), jnp.zeros(STATE)

    def gradients(function: Callable[..., Any], floats: Sequence[jax.Array]) -> Any:
        def loss(floats: Sequence[jax.Array]) -> jax.Array:
            return function(Tokens(*floats, starts=tokens.starts), state)[0].sum()

        return jax.grad(loss)(floats)

    of = {"corrects": kind != "no correction"}
    ways = (partial(recur, **of), partial(by_tokens, **of))
    costs = [measured(partial(gradients, way), tokens[:5]) for way in ways]
    (chunked, chunked_mib), (single, single_mib) = costs
    return {
        "recurrence": kind,
        "tokens": count,
        "seconds_ratio": single / chunked,
        "memory_ratio": single_mib / chunked_mib,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for name in MIXERS:
        for tokens in options.tokens:
            row = layer_costs(name, tokens)
            rows.append(row)
            print(
                f"layer {name}, {tokens} tokens: {row['us_per_token']:.1f} us and "
                f"{row['kib_per_token']:.1f} KiB a token",
                flush=True,
            )
    for kind in ("head", "channel", "no correction"):
        row = chunk_costs(kind, options.tokens[0])
        rows.append(row)
        print(
            f"token by token over chunks: {kind} seconds {row['seconds_ratio']:.1f}, "
            f"{kind} memory {row['memory_ratio']:.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
