"""Scans over chunks that tests check, aot.py compiles and bench.py times."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrence.chunks import Chunks


@dataclass(frozen=True, kw_only=True)
class Case:
    chunks: int = 3
    tokens: int = 16  # of a chunk
    batch: int = 1
    heads: int = 2
    key_dim: int = 24
    value_dim: int = 40
    corrects: bool = True  # with `erase`
    by_channel: bool = False  # a decay for each key channel
    dtype: str = "float32"

    @property
    def name(self) -> str:
        sizes = f"{self.chunks}x{self.tokens}x{self.batch}x{self.heads}"
        parts = [f"{sizes}x{self.key_dim}x{self.value_dim}", self.dtype]
        if self.corrects:
            parts.append("corrects")
        if self.by_channel:
            parts.append("by-channel")
        return "-".join(parts)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct | None]:
        """Returns the shapes and dtypes of the arrays of `draw`."""
        leading = (self.batch, self.heads)
        of_chunks = (self.chunks, *leading)
        decays = self.key_dim if self.by_channel else 1

        def wide(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        def narrow(columns: int) -> jax.ShapeDtypeStruct:
            shape = (*of_chunks, self.tokens, columns)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

        values = wide(*of_chunks, self.tokens, self.value_dim)
        state = wide(*leading, self.key_dim, self.value_dim)
        return {
            "decay": wide(*of_chunks, decays),
            "write": narrow(self.key_dim),
            "new": values,
            "erase": narrow(self.key_dim) if self.corrects else None,
            "read": narrow(self.key_dim),
            "inner": narrow(self.tokens),
            "state": state,
            "do": values,
            "dlast": state,
        }

    def draw(self, seed: int = 0) -> dict[str, jax.Array | None]:
        """Draws the arrays of Chunks, a state, and the gradients of both results.

        States stay of one size: decays are below 1, and rows of keys have lengths of at most 1. One
        chunk has a document's start.
        """
        random = np.random.default_rng(seed)
        lengths = {"write": 1.0, "erase": 0.25, "read": 1.0, "inner": 1.0}
        drawn = {}
        for name, like in self.abstract().items():
            if like is None:
                drawn[name] = None
                continue
            x = random.standard_normal(like.shape)
            if name in lengths:
                x *= lengths[name] * like.shape[-1] ** -0.5
            if name == "decay":
                x = random.uniform(0.5, 1.0, like.shape)
                x[self.chunks // 2] = 0.0
            drawn[name] = jnp.asarray(x, like.dtype)
        return drawn


def chunks_in(arrays: Mapping[str, Any]) -> Chunks:
    """Returns the chunks among the arrays of a case."""
    own: dict[str, Any] = {name: arrays.get(name) for name in Chunks._fields}
    return Chunks(**own)


CI = (
    Case(),  # neither dim is a power of 2, and there are several blocks of value channels
    Case(dtype="bfloat16", by_channel=True, key_dim=32, value_dim=48),
    Case(dtype="bfloat16", corrects=False, key_dim=16, value_dim=64, chunks=4),
    Case(by_channel=True, tokens=64, batch=2, heads=1, chunks=1, key_dim=16, value_dim=16),
)

# Cases that the kernels for Hopper take: two programs of a head, more chunks than slots of a ring.
HOPPER = (
    Case(
        dtype="bfloat16", by_channel=True, chunks=4, tokens=64, heads=1, key_dim=128, value_dim=128
    ),
    Case(dtype="bfloat16", corrects=False, chunks=4, tokens=64, heads=1, key_dim=64, value_dim=64),
)

SLOW = tuple(
    Case(
        chunks=5,
        tokens=64,
        key_dim=key_dim,
        value_dim=value_dim,
        corrects=corrects,
        by_channel=by_channel,
        dtype=dtype,
    )
    for key_dim, value_dim in ((128, 128), (96, 192), (128, 64), (256, 64))
    for corrects, by_channel in ((True, False), (True, True), (False, False))
    for dtype in ("bfloat16", "float32")
)


def _published(heads: int, value_dim: int, *, corrects: bool, by_channel: bool = False) -> Case:
    return Case(
        chunks=16,
        tokens=64,
        heads=heads,
        key_dim=128,
        value_dim=value_dim,
        corrects=corrects,
        by_channel=by_channel,
        dtype="bfloat16",
    )


# Those of one sequence, all heads of a layer.
PUBLISHED = {
    "Qwen3.5 27B": _published(48, 128, corrects=True),
    "Kimi Linear 48B": _published(32, 128, corrects=True, by_channel=True),
    "Nemotron 3 Nano": _published(64, 64, corrects=False),
}


def timed() -> list[Case]:
    """Lists a block of chunks of published models: 16 chunks of 64 tokens, all heads."""
    return list(PUBLISHED.values())
