"""Attention calls that tests check, aot.py compiles and bench.py times.

Letters as in problem.py.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

# "one" segment, "three" of equal length, "short" ones of one token each, or "padded": the last
# third is padding, with its own segment id.
Segments = Literal["", "one", "three", "short", "padded"]


@dataclass(frozen=True, kw_only=True)
class Case:
    b: int = 1
    t: int = 128
    s: int | None = None  # None: t
    heads: tuple[int, int] = (2, 2)  # of queries, of keys and values
    d: int = 64
    e: int | None = None  # None: d
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    segments: Segments = ""
    bias: tuple[bool, bool, bool, bool] | None = None  # which dims are whole; the others are 1
    positions: bool = False  # given: queries begin half way into the keys

    @property
    def name(self) -> str:
        sizes = f"{self.b}x{self.t}x{self.keys}-h{self.heads[0]}x{self.heads[1]}-d{self.d}"
        if self.e is not None:
            sizes += f"x{self.e}"
        parts = [sizes, self.dtype]
        if self.causal:
            parts.append("causal")
        if self.positions:
            parts.append("positions")
        if self.window:
            parts.append(f"window{self.window[0]},{self.window[1]}")
        if self.softcap:
            parts.append(f"softcap{self.softcap:g}")
        if self.segments:
            parts.append(f"segments-{self.segments}")
        if self.bias:
            parts.append("bias" + "".join("1" if whole else "0" for whole in self.bias))
        return "-".join(parts)

    @property
    def keys(self) -> int:
        return self.s or self.t

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of q, k, v, bias (if there is one) and dout."""
        heads, kv_heads = self.heads
        e = self.e or self.d
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.b, self.t, heads, self.d),
            "k": (self.b, self.keys, kv_heads, self.d),
            "v": (self.b, self.keys, kv_heads, e),
        }
        if self.bias:
            sizes = (self.b, heads, self.t, self.keys)
            shapes["bias"] = tuple(
                size if whole else 1 for size, whole in zip(sizes, self.bias, strict=True)
            )
        shapes["dout"] = (self.b, self.t, heads, e)
        return shapes

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of the arrays of `draw`."""
        dtype = jnp.dtype(self.dtype)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in self.shapes().items()}

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `attention` other than q, k, v and bias."""
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
        }
        if self.segments:
            options["segment_ids"] = (self._segment_ids(self.t), self._segment_ids(self.keys))
        if self.positions:
            start = np.full((self.b, 1), self.keys // 2)
            q_positions = np.arange(self.t) + start
            kv_positions = np.broadcast_to(np.arange(self.keys), (self.b, self.keys))
            options["positions"] = (
                jnp.asarray(q_positions, jnp.int32),
                jnp.asarray(kv_positions, jnp.int32),
            )
        return options

    def _segment_ids(self, length: int) -> jax.Array:
        at = np.arange(length)
        ids = {
            "one": 0 * at,
            "three": at * 3 // length,
            "short": at,
            "padded": at >= length - length // 3,
        }
        return jnp.asarray(np.broadcast_to(ids[self.segments], (self.b, length)), jnp.int32)

    def draw(self, seed: int = 0) -> dict[str, jax.Array]:
        """Draws q, k, v, bias (if there is one) and dout from the normal distribution."""
        random = np.random.default_rng(seed)
        return {
            name: jnp.asarray(random.standard_normal(shape), self.dtype)
            for name, shape in self.shapes().items()
        }


class Mask(TypedDict, total=False):
    """The fields of a case that define who attends to whom."""

    causal: bool
    window: tuple[int, int]
    segments: Segments


F32 = "float32"
CI = (
    Case(t=128, dtype=F32),
    Case(t=128, causal=True),
    Case(t=127, d=32, heads=(1, 1), causal=True, dtype=F32),
    Case(t=1, s=200, d=32, causal=True, dtype=F32),
    Case(t=1, d=64, heads=(1, 1)),
    Case(b=2, t=17, d=72, heads=(6, 3), dtype=F32),
    Case(t=64, s=128, d=32, heads=(4, 1), causal=True, dtype=F32),
    Case(t=128, s=64, d=32, heads=(4, 2), causal=True, dtype=F32),
    Case(t=131, s=140, d=80, causal=True),
    Case(t=128, d=96, window=(20, 0), causal=True, dtype=F32),
    Case(t=130, d=32, window=(24, 10), dtype=F32),
    Case(t=130, d=64, window=(None, 7)),
    Case(t=128, d=128, softcap=15.0, causal=True, dtype=F32),
    Case(t=128, d=64, softcap=50.0),
    Case(b=2, t=128, d=32, segments="one", dtype=F32),
    Case(b=2, t=128, d=32, segments="three", causal=True, heads=(4, 2), dtype=F32),
    Case(t=64, d=32, segments="short"),
    Case(t=64, d=32, segments="short", dtype=F32),
    Case(b=2, t=96, d=64, segments="padded", causal=True),
    Case(t=160, d=32, segments="three", window=(16, 0), causal=True, heads=(6, 3), dtype=F32),
    Case(t=100, d=192, e=128, heads=(2, 1), causal=True),
    Case(t=64, d=256, heads=(1, 1), causal=True),
    Case(t=96, d=64, dtype="float16", causal=True),
    Case(t=40, s=96, d=32, positions=True, causal=True, heads=(4, 2), dtype=F32),
    Case(t=70, d=32, bias=(False, True, True, True), causal=True, dtype=F32),
    # long: if dbias sums few terms, the sum of reference.py may be exact by luck
    Case(b=2, t=70, s=300, d=32, bias=(True, False, False, True), heads=(4, 2), dtype=F32),
)

_MASKS: tuple[Mask, ...] = (
    {},
    {"causal": True},
    {"window": (128, 0)},
    {"window": (64, 64)},
    {"segments": "three"},
    {"segments": "padded"},
    {"segments": "three", "causal": True, "window": (64, 0)},
)


def _slow() -> tuple[Case, ...]:
    cases = []
    for d in (32, 64, 72, 80, 96, 128, 192, 256):
        for dtype in ("bfloat16", "float32"):
            cases += [Case(d=d, dtype=dtype, heads=(2, 1), t=200, **mask) for mask in _MASKS]
    for t in (1, 17, 127, 384, 1000):
        for heads in ((1, 1), (4, 1), (6, 3)):
            cases += [Case(t=t, d=64, heads=heads, **mask) for mask in _MASKS[:2]]
    for t, s in ((64, 128), (128, 64), (1, 1024), (1023, 1024)):
        cases += [Case(t=t, s=s, causal=causal) for causal in (False, True)]
    return tuple(cases)


SLOW = _slow()


def timed(tokens: int = 16384, width: int = 2048) -> list[Case]:
    """Lists the points of the FlashAttention-3 paper, and three more: grouped, windowed, packed.

    `tokens` is batch x length, `width` is heads x head dim.
    """
    cases = []
    for d in (64, 128, 256):
        heads = (width // d, width // d)
        for t in (512, 1024, 2048, 4096, 8192, 16384):
            case = Case(b=max(tokens // t, 1), t=t, d=d, heads=heads)
            cases += [case, replace(case, causal=True)]
    grouped = Case(b=4, t=4096, d=128, heads=(32, 8), causal=True)
    long = Case(b=1, t=16384, d=128, heads=(16, 16), causal=True)
    windowed = replace(long, window=(1024, 0))
    packed = replace(long, b=2, t=8192, segments="three")
    return [*cases, grouped, windowed, packed]
