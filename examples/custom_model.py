"""A custom model on any mesh: causal gated convolutions in place of attention.

    python examples/custom_model.py [--steps 200] [--mesh split|stages|one]

No download, any CPU: the process pretends to have 8 devices. The model names the dims of its
weights and activations ("channel", "inner", ...); only RULES says which mesh axes split them;
`stages` pipelines the same model. The output shows where each weight is kept, then the loss falling
from about ln 256 = 5.5, the same on every mesh.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import nnx

import spmdtrain as st
from spmdtrain.config import GPT, AdamW, Llama, MeshConfig, RulesConfig, TrainConfig
from spmdtrain.models.layers import Norm, weight
from spmdtrain.show import show

TAPS = 8  # tokens that one convolution sees
RULES = RulesConfig(
    parameters={"channel": ("fsdp",), "inner": ("tensor",), "tap": ()},
    activations={"channel": (), "inner": ("tensor",)},
)
MESHES = {
    "split": MeshConfig(data=2, fsdp=2, tensor=2),
    "stages": MeshConfig(pipeline=2, data=2, tensor=2),
    "one": MeshConfig(),
}


class Block(nnx.Module):
    """x + down(silu(gate) * convolution(value)). b batch, t time, c channel, i inner, k tap."""

    def __init__(self, config: GPT | Llama, rngs: nnx.Rngs):
        channel, inner = config.embed, config.ffn
        self.norm = Norm(config)
        self.up_cpi = weight(rngs, (channel, 2, inner), ("channel", None, "inner"))
        self.taps_ki = weight(rngs, (TAPS, inner), ("tap", "inner"), std=TAPS**-0.5)
        self.down_ic = weight(rngs, (inner, channel), ("inner", "channel"))

    def __call__(self, x_btc: jax.Array, ctx: st.ForwardContext) -> jax.Array:
        up_btpi = jnp.einsum("btc,cpi->btpi", self.norm(x_btc, ctx), self.up_cpi[...])
        up_btpi = ctx.constrain(up_btpi, "batch", "time", None, "inner")
        gate, value = up_btpi[:, :, 0], jnp.pad(up_btpi[:, :, 1], ((0, 0), (TAPS - 1, 0), (0, 0)))
        mixed = sum(value[:, k : k + gate.shape[1]] * self.taps_ki[k] for k in range(TAPS))
        out = jnp.einsum("bti,ic->btc", jax.nn.silu(gate) * mixed, self.down_ic[...])
        return ctx.constrain(x_btc + out, "batch", "time", "channel")


class Convolutions(nnx.Module):
    """A model with the parts that a training step needs: `embed`, `blocks`, `head`."""

    def __init__(self, config: st.RunConfig, rngs: nnx.Rngs):
        model = config.model
        self.table_vc = weight(rngs, (config.vocab, model.embed), ("vocab", "channel"))
        self.blocks = st.Stack(lambda rngs: Block(model, rngs), model.layers, rngs)
        self.norm = Norm(model)

    def embed(self, tokens_bt: jax.Array, ctx: st.ForwardContext) -> jax.Array:
        return ctx.constrain(ctx.lookup(self.table_vc[...], tokens_bt), "batch", "time", "channel")

    def head(self, x_btc: jax.Array, ctx: st.ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Returns hidden [b, t, c] and table [v, c], whose product is the logits."""
        return ctx.constrain(self.norm(x_btc, ctx), "batch", "time", "channel"), self.table_vc[...]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mesh", default="split", choices=MESHES)
    chosen = parser.parse_args()
    if chosen.steps < 1:
        refused = f"--steps {chosen.steps} is not a whole number of at least 1"
        parser.exit(4, f"{parser.prog}: {refused}\n")
    st.simulate_devices(1 if chosen.mesh == "one" else 8)  # omit this line on GPUs
    model = GPT(layers=4, embed=64)
    train = TrainConfig(steps=chosen.steps, sequence_length=64, microbatch=2)
    parts = {"model": model, "train": train, "optimizer": AdamW(learning_rate=3e-3)}
    config = st.RunConfig(**parts, mesh=MESHES[chosen.mesh], rules=RULES)
    for row in show.describe(config, Convolutions)[0]["parameters"]:
        print(f"{row['path']:28} {row['shape']!s:18} split over {row['mesh_axes']}")
    st.run(config, f"runs/custom_model_{chosen.mesh}", make=Convolutions)
