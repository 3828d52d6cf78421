"""A weight of another type in every projection: an adapter of low rank on a base of integers.

Both are a class below, and no layer changes. On every kind of mesh it has the loss and the
gradients of one device, and a run of it is saved, resumed on another mesh and sampled.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import MESHES_OF_WEIGHTS, batches_of, mesh_of, tiny
from shares import core

import spmdtrain as st
from spmdtrain.models.buffer import Buffer
from spmdtrain.models.layers import matmul_weight, weight
from spmdtrain.models.projection import Product
from spmdtrain.models.stack import Stack
from spmdtrain.models.transformer import Block, Transformer
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.step import make_gradients, make_losses

pytestmark = pytest.mark.long

ON_BOTH = ("collective matmuls", "zero bubble")  # Pythons

SMALLEST = (
    "model.embed=16",
    "model.heads=2",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=8",
)
RANK = 4


class Int8(nnx.Module):
    """A frozen weight of integers with a scale for each output."""

    def __init__(self, made: nnx.Param, from_stream: bool):
        axes = made.out_sharding
        inputs = (0,) if from_stream else tuple(range(made.ndim - 1))
        scale = jnp.abs(made[...]).max(inputs, keepdims=True) / 127
        self.values = Buffer(jnp.round(made[...] / scale).astype(jnp.int8), out_sharding=axes)
        outputs = axes[1:] if from_stream else axes[-1:]
        self.scale = Buffer(scale.squeeze(inputs), out_sharding=outputs)

    def multiply(self, product: Product, x: jax.Array) -> jax.Array:
        return product(x, self.values[...].astype(x.dtype)) * self.scale[...]


class LowRank(nnx.Module):
    """LoRA (arXiv:2106.09685): a product of two thin matrices beside a frozen base."""

    def __init__(self, made: nnx.Param, from_stream: bool, rngs: nnx.Rngs):
        axes = made.out_sharding
        cut = 1 if from_stream else made.ndim - 1
        self.base = Int8(made, from_stream)
        self.a = matmul_weight(rngs, (*made.shape[:cut], RANK), (*axes[:cut], None))
        self.b = weight(rngs, (RANK, *made.shape[cut:]), (None, *axes[cut:]))

    def multiply(self, product: Product, x: jax.Array) -> jax.Array:
        low = product.to_rank(x, self.a[...])
        return self.base.multiply(product, x) + 2.0 * jnp.tensordot(low, self.b[...], 1)


class Adapted(Block):
    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        for part, name, from_stream in (
            (self.attention, "qkv_eknd", True),
            (self.attention, "out_kgde", False),
            (self.mlp, "up_ef", True),
            (self.mlp, "down_fe", False),
        ):
            setattr(part, name, LowRank(getattr(part, name), from_stream, rngs))


class AdaptedTransformer(Transformer):
    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.blocks = Stack(lambda rngs: Adapted(config.model, rngs), config.model.layers, rngs)


@cache
def first_batch(*settings: str) -> tuple[float, float, dict[str, np.ndarray]]:
    """(mean loss of training, of evaluation, gradients) of the initial weights."""
    setup = st.shard(
        tiny(*SMALLEST, *settings), AdaptedTransformer, jax.devices()[: mesh_of(settings)]
    )
    gradients, losses = make_gradients(setup), make_losses(setup)
    state = st.init_state(setup)
    both = jax.jit(
        lambda params, step, batch: (gradients(params, step, batch), losses(params, batch))
    )
    with batches_of(setup) as ahead:
        (found, train), evaluation = jax.device_get(both(state.params, state.step, next(ahead)))
    means = (float(sums["loss"] / sums["tokens"]) for sums in (train, evaluation))
    return *means, plain_arrays(setup, found)


@pytest.mark.parametrize(
    "layout", [*core(*ON_BOTH), *(each for each in MESHES_OF_WEIGHTS if each not in ON_BOTH)]
)
def test_a_weight_type_has_the_loss_and_gradients_of_one_device(layout):
    *got, found = first_batch(*MESHES_OF_WEIGHTS[layout])
    *want, wanted = first_batch()
    assert got == pytest.approx(want, rel=1e-5)
    assert found.keys() == wanted.keys()
    assert {path for path in found if ".qkv_eknd." in path} == {
        "blocks.layer.attention.qkv_eknd.a",
        "blocks.layer.attention.qkv_eknd.b",
    }
    for path in wanted:
        off = np.max(np.abs(found[path] - wanted[path])) / np.max(np.abs(wanted[path]))
        assert off <= 1e-5, f"{path}: {off}"


def test_integers_rest_as_integers_travel_as_integers_and_are_not_trained(tmp_path):
    """In a run that is saved on fsdp, goes on in a pipeline, and writes a text."""
    few = ("train.steps=2", "optimizer.warmup=0", "optimizer.schedule=constant")
    config = tiny(*SMALLEST, *few, "mesh.fsdp=2")
    setup = st.shard(config, AdaptedTransformer, jax.devices()[:2])
    before = jax.device_get(st.init_state(setup).params)
    values = "blocks.layer.attention.qkv_eknd.base.values"
    assert setup.state.params[values].dtype == jnp.int8
    text = st.make_step(setup).lower(setup.state, setup.batch).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line and "xi8>" in line]
    assert gathers, "the base crosses the network as it rests"
    st.run(config, tmp_path / "run", make=AdaptedTransformer, devices=jax.devices()[:2])
    longer = tiny(*SMALLEST, *few, "train.steps=3", *MESHES_OF_WEIGHTS["pipeline"])
    assert st.run(longer, tmp_path / "run", make=AdaptedTransformer).step == 3
    after = st.weights(tmp_path / "run")
    assert np.array_equal(after[values], before[values])
    trained = values.replace("base.values", "a")
    assert not np.array_equal(after[trained], before[trained])
    ids = st.generate(tmp_path / "run", [1, 2, 3], 4, make=AdaptedTransformer)
    assert len(ids) == 7
