"""Linear + cross-entropy calls that tests check and bench.py times."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.loss.chunks import CHUNK_LOGITS


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
    scale: float = 1.0
    softcap: float | None = None
    chunk_logits: int = CHUNK_LOGITS

    @property
    def name(self) -> str:
        parts = [f"{self.b}x{self.t}x{self.width}-v{self.vocab}", self.dtype]
        if self.masked:
            parts.append("masked")
        if self.label_smoothing:
            parts.append(f"smoothing{self.label_smoothing:g}")
        if self.z_loss:
            parts.append(f"z{self.z_loss:g}")
        if self.scale != 1:
            parts.append(f"scale{self.scale:g}")
        if self.softcap is not None:
            parts.append(f"softcap{self.softcap:g}")
        if self.chunk_logits < CHUNK_LOGITS:
            parts.append(f"chunks-of-{self.chunk_logits}")
        return "-".join(parts)

    def draw(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Draws x, weight, targets and mask: 1, except for a third of 0s if `masked`."""
        random = np.random.default_rng(seed)
        x = random.standard_normal((self.b, self.t, self.width))
        weight = 0.3 * random.standard_normal((self.vocab, self.width))
        targets = random.integers(0, self.vocab, (self.b, self.t))
        mask = np.ones((self.b, self.t))
        if self.masked:
            mask = random.random((self.b, self.t)) > 1 / 3
        return (
            jnp.asarray(x, self.dtype),
            jnp.asarray(weight, self.dtype),
            jnp.asarray(targets, jnp.int32),
            jnp.asarray(mask, jnp.float32),
        )


CI = (
    Case(),
    Case(chunk_logits=600, masked=True),
    Case(chunk_logits=1, vocab=101, label_smoothing=0.1),
    Case(z_loss=1e-3, chunk_logits=1000, masked=True),
    Case(dtype="bfloat16", chunk_logits=1000, label_smoothing=0.1, z_loss=1e-4, masked=True),
    Case(scale=0.5, softcap=1.5, z_loss=1e-3, label_smoothing=0.1, chunk_logits=600, masked=True),
)


def timed() -> list[Case]:
    """Lists the cases at which Liger was measured, on an A100: weights of 4096 x 128256."""
    return [Case(b=1, t=t, width=4096, vocab=128256, dtype="bfloat16") for t in (4096, 8192, 32768)]
