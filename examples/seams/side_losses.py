"""Custom side losses, by name: blocks that keep their output small and change little.

python examples/seams/side_losses.py
"""

import jax.numpy as jnp

import spmdtrain as st
from spmdtrain.models.transformer import Block

CONFIG = st.RunConfig(
    model={"name": "llama", "layers": 2, "embed": 32, "heads": 2},
    mesh={"data": -1},
    train={"steps": 20},
    optimizer={"name": "adamw", "learning_rate": 1e-2, "warmup": 0},
    data={"corpus": "synthetic"},
)


class Calm(Block):
    """A part with two side losses; training adds both, and metrics.jsonl has a figure of each."""

    def __call__(self, x_bte, ctx):
        y_bte = super().__call__(x_bte, ctx)
        size = jnp.square(y_bte.astype(jnp.float32)).mean(-1).sum()
        change = jnp.square((y_bte - x_bte).astype(jnp.float32)).mean(-1).sum()
        return y_bte, {"size": 30 * size, "change": 3 * change}  # weighted, over all tokens


class CalmTransformer(st.Transformer):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.blocks = st.Stack(lambda rngs: Calm(config.model, rngs), config.model.layers, rngs)


if __name__ == "__main__":
    st.run(CONFIG, "runs/calm", make=CalmTransformer)
