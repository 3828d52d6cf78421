"""A layer of one part is that part of a whole layer, and a layer of two mixers the sum of both."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import initial_weights, tiny

from spmdtrain.models.abstract import build_model
from spmdtrain.models.choose import choose_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import Attention
from spmdtrain.models.layers.mixers.two_mixers import TwoMixers

SMALL = ("model.embed=16", "model.heads=2", "model.vocab=32", "model.name=llama")
SSD = ("model.ssd.heads=4", "model.ssd.head_dim=6", "model.ssd.state=8", "model.ssd.groups=2")
EXPERTS = ("model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=16")
CONTEXT = ForwardContext(jnp.arange(12)[None])


def weights(settings: tuple[str, ...]) -> dict[str, np.ndarray]:
    return initial_weights(*settings, "train.sequence_length=12")


def hidden(settings: tuple[str, ...], params: dict[str, np.ndarray]) -> jax.Array:
    """The stream of a row of tokens behind the last norm."""
    bound = build_model(*choose_model(tiny(*settings))).bind(jax.tree.map(jnp.asarray, params))
    stream = bound.embed(jnp.arange(12)[None] % 7, CONTEXT)
    return bound.head(bound.blocks(stream, CONTEXT)[0], CONTEXT)[0]


def within(path: str) -> str:
    """The path within a block, of a stack or a round; of all else the path itself."""
    return re.sub(r"^blocks\.layer\.(block\.\d\.)?", "", path)


@pytest.mark.seconds
@pytest.mark.parametrize("norm_places", ["before", "after", "both"])
@pytest.mark.parametrize("mlp", ["mlp", "experts"])
def test_layers_of_one_part_are_whole_layers_cut_in_two(norm_places, mlp):
    settings = (*SMALL, *SSD, f"model.norm_places={norm_places}")
    if mlp == "experts":
        settings += EXPERTS
    whole = (*settings, "model.layers=1", "model.mixers=['ssd']")
    apart = ("model.layers=2", "model.mixers=['ssd', 'none']", f"model.mlps=['none', '{mlp}']")
    params = weights(whole)
    of_block = {within(path): path for path in params}
    of_parts = {path: of_block.pop(within(path)) for path in weights((*settings, *apart))}
    assert not of_block  # every weight is that of one of the two
    cut = {path: params[name] for path, name in of_parts.items()}
    want = hidden(whole, params)
    np.testing.assert_allclose(hidden((*settings, *apart), cut), want, rtol=1e-5, atol=1e-6)


@pytest.fixture
def both():
    """A mixer of attention and a state space, with factors."""
    factors = ("model.both.in_factor=1.5", "model.both.out_factor=0.25", "model.ssd.out_factor=3.0")
    config = tiny(*SMALL, *SSD, *factors, "model.mixers=['both']").model
    with nnx.use_eager_sharding(False):
        return TwoMixers(config, nnx.Rngs(0), attention=Attention)


def test_two_mixers_read_one_input_and_are_summed_with_their_factors(both):
    x = jax.random.normal(jax.random.key(0), (1, 12, 16))
    of_state, _ = both.ssd(x, CONTEXT)
    of_attention, _ = both.attention(1.5 * x, CONTEXT)
    want = 0.25 * of_attention + of_state
    np.testing.assert_allclose(both(x, CONTEXT)[0], want, rtol=1e-6, atol=1e-7)


def test_side_losses_of_the_attention_beside_a_state_space_are_kept(both):
    attention = both.attention
    both.attention = lambda x, ctx, cache: ((attention(x, ctx)[0], {"cost": 2.0}), cache)
    (_, losses), _ = both(jnp.ones((1, 12, 16)), CONTEXT)
    assert losses == {"cost": 2.0}
