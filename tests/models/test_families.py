"""The shipped block is each of thirteen families, by its settings: against the numpy of
family_oracle.py, in float32 on one device.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, VOCAB, T, draw_params, family_config
from family_oracle import logits as logits_by_definition

from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logit_shape, logits_of

TOLERANCE = 2e-6  # of the root of the mean square, relative; float32 itself makes 6e-7
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, T))


@cache
def made(name: str):
    """(config, model, parameters)."""
    config = family_config(name)
    model = build_model(config)
    return config, model, draw_params(model, config.model.norm_offset)


def apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_logits_of_its_definition(name):
    config, model, params = made(name)

    @jax.jit
    def run(params, tokens_bt):
        ctx = ForwardContext(jnp.broadcast_to(jnp.arange(T), tokens_bt.shape))
        module = model.bind(params)
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        return logits_of(*module.head(x_bte, ctx), **logit_shape(config.model))

    got = np.asarray(run(params, TOKENS), np.float64)
    assert apart(got, logits_by_definition(config.model, params, TOKENS)) <= TOLERANCE
