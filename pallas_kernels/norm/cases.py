"""Norm calls that tests check, aot.py compiles and bench.py times."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    op: str = "rmsnorm"  # or layernorm
    rows: int = 3
    width: int = 192
    dtype: str = "bfloat16"  # of x and dy
    weights: str = "float32"  # of scale and bias
    bias: bool = False
    residual: str | None = None  # its dtype
    mean: float = 0.0  # of a row of x, whose deviation is 1

    @property
    def name(self) -> str:
        parts = [self.op, f"{self.rows}x{self.width}", self.dtype, f"weights-{self.weights}"]
        if self.bias:
            parts.append("bias")
        if self.residual:
            parts.append(f"residual-{self.residual}")
        if self.mean:
            parts.append(f"mean{self.mean:g}")
        return "-".join(parts)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct | None]:
        """Returns the shapes and dtypes of the arrays of `draw`."""
        shape = (self.rows, self.width)
        x = jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        vector = jax.ShapeDtypeStruct((self.width,), jnp.dtype(self.weights))
        residual = None
        if self.residual:
            residual = jax.ShapeDtypeStruct(shape, jnp.dtype(self.residual))
        return {
            "x": x,
            "scale": vector,
            "bias": vector if self.bias else None,
            "residual": residual,
            "dy": x,
            "dtotal": residual,
        }

    def draw(self, seed: int = 0) -> dict[str, jax.Array | None]:
        """Draws x, scale, bias, residual, dy and dtotal; None if the case has no such array."""
        random = np.random.default_rng(seed)
        shape = (self.rows, self.width)

        def normal(shape, dtype):
            return jnp.asarray(random.standard_normal(shape), dtype)

        return {
            "x": (normal(shape, "float32") + self.mean).astype(self.dtype),
            "scale": 1 + 0.1 * normal((self.width,), self.weights),
            "bias": normal((self.width,), self.weights) if self.bias else None,
            "residual": normal(shape, self.residual) if self.residual else None,
            "dy": normal(shape, self.dtype),
            "dtotal": normal(shape, self.residual) if self.residual else None,
        }


CI = (
    Case(rows=1, width=64, dtype="float32"),
    Case(rows=128, width=1000, residual="float32"),
    Case(rows=130, width=192, weights="bfloat16", residual="bfloat16"),
    Case(op="layernorm", rows=128, width=768, bias=True),
    Case(op="layernorm", rows=3, width=1024, dtype="float32", bias=True, residual="float32"),
    Case(op="layernorm", rows=17, width=100, mean=30.0),
    Case(op="layernorm", rows=17, width=100, mean=30.0, dtype="float32"),
    Case(op="layernorm", rows=300, width=72, weights="bfloat16", bias=True, residual="bfloat16"),
    Case(rows=2048, width=64),
)

SLOW = tuple(
    Case(op=op, rows=rows, width=width, dtype=dtype, bias=bias, residual=dtype if bias else None)
    for op in ("layernorm", "rmsnorm")
    for rows in (1, 3, 128)
    for width in (64, 192, 768, 1000, 4096, 5120, 8192)
    for dtype in ("bfloat16", "float32")
    for bias in (False, True)
)


def timed() -> list[Case]:
    """Lists cases larger than any L2 cache, and one so small that latency counts."""
    wide = [
        Case(op=op, rows=2**28 // width, width=width, residual=residual)
        for op in ("layernorm", "rmsnorm")
        for width in (1024, 4096, 8192)
        for residual in (None, "bfloat16")
    ]
    return [*wide, Case(rows=1024, width=1024)]
