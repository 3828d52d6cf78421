"""Whole models with linear-time mixers: documents in one row are as each apart, by the numpy of
family_oracle.py, and one does not depend on the one before by a bit.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import VOCAB, T, draw_params, family_config
from family_oracle import logits as logits_by_definition

from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logit_shape, logits_of

LENGTHS = (13, 9, 18)
# Of the root of the mean square. Norms of a state's small outputs enlarge rounding.
TOLERANCES = {"lfm2_moe": 2e-6, "olmo_hybrid": 1e-5, "kimi_linear": 4e-6}
TOLERANCES |= {"nemotron_h": 2e-6, "falcon_h1": 2e-6}
TOLERANCES |= {"gemma4 with shared keys": 4e-6}
TOKENS = np.random.default_rng(4).integers(0, VOCAB, (1, T))


@cache
def made(name: str):
    """(settings of the model, parameters, its logits of a row of documents)."""
    config = family_config(name)
    model = build_model(config)
    params = draw_params(model, config.model.norm_offset)
    arrays = jax.tree.map(jnp.asarray, params)
    segments = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None]
    positions = np.concatenate([np.arange(length) for length in LENGTHS])[None]

    @jax.jit
    def run(tokens_bt):
        ctx = ForwardContext(positions, segments, ids_bt=tokens_bt)
        module = model.bind(arrays)
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        return logits_of(*module.head(x_bte, ctx), **logit_shape(config.model))

    return config.model, params, run


@pytest.mark.long
@pytest.mark.parametrize("name", TOLERANCES)
def test_documents_in_a_row_are_as_each_apart(name):
    model, params, run = made(name)
    documents = np.split(TOKENS, np.cumsum(LENGTHS)[:-1], 1)
    want = [logits_by_definition(model, params, document) for document in documents]
    want = np.concatenate(want, 1)
    got = np.asarray(run(TOKENS), np.float64)
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) <= TOLERANCES[name]
    last = LENGTHS[0] - 1
    changed = TOKENS.copy()
    changed[0, last] = (changed[0, last] + 1) % VOCAB
    again = np.asarray(run(changed))
    assert np.any(again[0, last] != got[0, last])
    assert np.array_equal(again[0, last + 1 :], got[0, last + 1 :])
