"""The two factors of layers' own embeddings in front of norms: these hide them where an epsilon
does not count, so here what they read is small.
"""

from functools import cache

import family_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import VOCAB, T, draw_params, family_config
from family_oracle import logits as logits_by_definition

from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logit_shape, logits_of

NAME = "gemma4 with tokens"
TOLERANCE = 2e-6
TOKENS = np.random.default_rng(6).integers(0, VOCAB, (1, T))
# The weights in front of a norm: of the embedding's projection, or of all that a layer reads.
SMALL = {
    "the projection": ("beside.project_ef",),
    "what layers read": ("beside.table_vf", "beside.scale_p"),
}


@cache
def made(what: str):
    """(settings of the model, parameters of which those of `what` are small, our logits)."""
    config = family_config(NAME)
    model = build_model(config)
    params = {
        path: x * (1e-3 if path.endswith(SMALL[what]) else 1)
        for path, x in draw_params(model).items()
    }

    @jax.jit
    def run(params, tokens_bt):
        ctx = ForwardContext(jnp.arange(T)[None], ids_bt=tokens_bt)
        module = model.bind(params)
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        return logits_of(*module.head(x_bte, ctx), **logit_shape(config.model))

    return config.model, params, np.asarray(run(params, TOKENS), np.float64)


def apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


of_definition = family_oracle.token_layers


def without_half(*arguments):
    return of_definition(*arguments) * np.sqrt(2)


def without_width(model, p, x, tokens_bt):
    project_ef = p["blocks.beside.project_ef"] * np.sqrt(model.embed)
    return of_definition(model, p | {"blocks.beside.project_ef": project_ef}, x, tokens_bt)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("what", "mistake"),
    [("the projection", without_width), ("what layers read", without_half)],
)
def test_a_factor_in_front_of_a_norm_shows_where_its_epsilon_counts(what, mistake, monkeypatch):
    model, params, ours = made(what)
    assert apart(ours, logits_by_definition(model, params, TOKENS)) <= TOLERANCE
    monkeypatch.setattr(family_oracle, "token_layers", mistake)
    assert apart(ours, logits_by_definition(model, params, TOKENS)) > 1e-4
