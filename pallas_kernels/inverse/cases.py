"""Inverses that tests check, aot.py compiles and bench.py times."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    matrices: int = 3
    size: int = 32
    alike: bool = False  # rows of nearly equal keys, at the largest rate: powers of L are huge

    @property
    def name(self) -> str:
        return f"{self.matrices}x{self.size}{'-alike' if self.alike else ''}"

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of the arrays of `draw`."""
        like = jax.ShapeDtypeStruct((self.matrices, self.size, self.size), jnp.float32)
        return {"lower": like, "dy": like}

    def draw(self, seed: int = 0) -> dict[str, jax.Array]:
        """Draws a strictly lower triangle, and a gradient of its inverse."""
        random = np.random.default_rng(seed)
        shape = self.abstract()["lower"].shape
        lower = random.standard_normal(shape) / self.size**0.5
        if self.alike:
            lower = 2 + 0.05 * lower
        arrays = {"lower": np.tril(lower, -1), "dy": random.standard_normal(shape)}
        return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


CI = (Case(), Case(size=64, matrices=2), Case(size=64, alike=True), Case(size=16, matrices=1))
SLOW = (Case(size=64, matrices=100), Case(size=32, matrices=100, alike=True))


def timed() -> list[Case]:
    """Lists those of 16 chunks of Qwen3.5 27B, and of Kimi Linear 48B."""
    return [Case(size=64, matrices=16 * heads) for heads in (48, 32)]
