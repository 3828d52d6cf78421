"""Linear + cross-entropy calls that tests check and `bench.py` times."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    b: int = 2
    t: int = 24
    width: int = 32
    vocab: int = 96
    dtype: str = "float32"
    masked: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_logits: int = 2**26

    @property
    def name(self) -> str:
        said = [f"{self.b}x{self.t}x{self.width}-v{self.vocab}", self.dtype] + [
            "masked"
        ] * self.masked
        said += [f"smoothing{self.label_smoothing:g}"] if self.label_smoothing else []
        said += [f"z{self.z_loss:g}"] if self.z_loss else []
        return "-".join(
            said + ([f"chunks-of-{self.chunk_logits}"] if self.chunk_logits < 2**26 else [])
        )

    def draw(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """x, weight, targets, mask (a third of it 0 where masked, else 1)."""
        random = np.random.default_rng(seed)
        x = random.standard_normal((self.b, self.t, self.width))
        weight = 0.3 * random.standard_normal((self.vocab, self.width))
        targets = random.integers(0, self.vocab, (self.b, self.t))
        mask = random.random((self.b, self.t)) > 1 / 3 if self.masked else np.ones((self.b, self.t))
        x, weight = (jnp.asarray(each, self.dtype) for each in (x, weight))
        return x, weight, jnp.asarray(targets, jnp.int32), jnp.asarray(mask, jnp.float32)


CI = (
    Case(),
    Case(chunk_logits=600, masked=True),
    Case(chunk_logits=1, vocab=101, label_smoothing=0.1),
    Case(z_loss=1e-3, chunk_logits=1000, masked=True),
    Case(dtype="bfloat16", chunk_logits=1000, label_smoothing=0.1, z_loss=1e-4, masked=True),
)


def timed() -> list[Case]:
    """As Liger measured them, on an A100 with 4096 x 128256."""
    return [Case(b=1, t=t, width=4096, vocab=128256, dtype="bfloat16") for t in (4096, 8192, 32768)]
