"""Custom parts in the shipped transformer: a squared-ReLU mlp, and no positions at all.

python examples/seams/parts.py
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import spmdtrain as st
from spmdtrain.models.layers import Attention, weight

CONFIG = st.RunConfig(
    model={"name": "llama", "layers": 2, "embed": 32, "heads": 2},
    mesh={"data": -1},
    train={"steps": 20},
    data={"corpus": "synthetic"},
)


class SquaredRelu(nnx.Module):
    """The mlp down(relu(up(x))^2), arXiv:2109.08668. The dims' names say how it may be split."""

    def __init__(self, config, rngs):
        self.up_ef = weight(rngs, (config.embed, config.ffn), ("embed", "ffn"))
        self.down_fe = weight(rngs, (config.ffn, config.embed), ("ffn", "embed"))

    def __call__(self, x_bte, ctx):
        h_btf = ctx.constrain(x_bte @ self.up_ef[...], "batch", "time", "ffn")
        return jnp.square(jax.nn.relu(h_btf)) @ self.down_fe[...]


no_position = partial(Attention, position=lambda x_btkgd, positions_bt: x_btkgd)
model = partial(st.Transformer, mlp=SquaredRelu, attention=no_position)

if __name__ == "__main__":
    st.run(CONFIG, "runs/squared_relu", make=model)
