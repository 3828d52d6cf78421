"""The transformer spells both families, looks back only, keeps documents apart, and its noise
depends on nothing but (seed, step, sample, layer, site).
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny, trained

from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext, random_key, sample_noise
from spmdtrain.models.layers import Mlp, Norm, empty_cache, rotate
from spmdtrain.models.size import matmul_parameters, train_flops_per_token
from spmdtrain.models.stack import Stack
from spmdtrain.models.transformer import Transformer

GPT = ("model.vocab=50",)
LLAMA = (
    *GPT,
    "model.name=llama",
    "model.layers=2",
    "model.embed=32",
    "model.heads=4",
    "model.kv_heads=2",
)
T = 12


class Layered(Mlp):
    """Does something else in each layer, and has a side loss."""

    def __call__(self, x_bte, ctx):
        y_bte = super().__call__(x_bte, ctx) * (1 + ctx.layer)
        return y_bte, jnp.square(y_bte).sum()


class Numbered(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.own = nnx.Param(jax.random.normal(rngs.params()), out_sharding=())

    def __call__(self, x, ctx):
        return x, {"tens": 0 * self.own[...] + 10**ctx.layer}


@cache
def build(*settings: str, **parts):
    config = tiny(*settings, f"train.sequence_length={T}")
    blueprint = build_model(config, partial(Transformer, **parts))
    return config, blueprint, jax.jit(blueprint.init)(jax.random.key(0))


def context(batch: int = 1, **changes) -> ForwardContext:
    return ForwardContext(jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (batch, T)), **changes)


@cache
def jitted(*family: str, **parts):
    blueprint = build(*family, **parts)[1]

    def run(params, tokens_bt, positions_bt, segments_bt):
        ctx = ForwardContext(positions_bt, segments_bt)
        model = blueprint.bind(params)
        hidden, table = model.head(model.blocks(model.embed(tokens_bt, ctx), ctx)[0], ctx)
        return hidden @ table.T

    return jax.jit(run)


def logits(family, tokens_bt, positions_bt=None, segments_bt=None, **parts):
    if positions_bt is None:
        positions_bt = context(len(tokens_bt)).positions_bt
    run, (_, _, params) = jitted(*family, **parts), build(*family, **parts)
    return run(params, tokens_bt, positions_bt, segments_bt)


def draw(batch: int = 1, seed: int = 0):
    return jax.random.randint(jax.random.key(seed), (batch, T), 0, 50)


@pytest.mark.seconds
@pytest.mark.parametrize("family", [GPT, LLAMA], ids=["gpt", "llama"])
def test_no_token_sees_a_later_one(family):
    before, after = (logits(family, tokens) for tokens in (draw(), draw().at[0, 7].add(1) % 50))
    assert np.array_equal(before[:, :7], after[:, :7])
    assert all(np.any(before[0, t] != after[0, t]) for t in range(7, T))


@pytest.mark.parametrize("family", [GPT, LLAMA], ids=["gpt", "llama"])
def test_documents_in_one_window_are_as_if_alone(family):
    segments = jnp.array([[0] * 5 + [1] * 7])
    positions = jnp.array([[*range(5), *range(7)]], jnp.int32)
    packed = logits(family, draw(), positions, segments)
    alone = logits(family, draw()[:, 5:], positions[:, 5:])
    np.testing.assert_allclose(packed[:, 5:], alone, rtol=1e-5, atol=1e-5)


def test_the_two_families_have_their_parts():
    gpt, llama = (set(build(*family)[1].parameters) for family in (GPT, LLAMA))
    assert {"positions_te", "norm.bias_e", "blocks.layer.attention.qkv_bias"} <= gpt - llama
    assert "unembed_ve" in llama and not any("bias" in path for path in llama)


@pytest.mark.parametrize("family", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_size_formula_counts_the_real_matrices(family):
    config, blueprint, _ = build(*family)
    lookups = {"positions_te"} if config.model.tied else {"tokens.table_ve"}
    matrices = sum(
        p.size
        for path, p in blueprint.parameters.items()
        if path not in lookups and "bias" not in path and "norm" not in path
    )
    assert matmul_parameters(config.model) == matrices
    attention = 6 * config.model.layers * config.model.embed * T
    assert train_flops_per_token(config.model, T) == 6 * matrices + attention


@pytest.mark.seconds
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient(remat):
    _, blueprint, params = build(*GPT)

    def loss(params, remat):
        model, beside = blueprint.bind(params), context(2, remat=remat)
        return jnp.sum(jnp.square(model.blocks(model.embed(draw(2), beside), beside)[0]))

    want, got = (
        jax.jit(jax.grad(loss), static_argnums=1)(params, mode) for mode in ("none", remat)
    )
    for path in want:
        np.testing.assert_allclose(
            got[path], want[path], rtol=2e-4, atol=2e-4 * float(jnp.max(jnp.abs(want[path])))
        )


@pytest.mark.core
def test_noise_depends_on_seed_step_sample_layer_and_site_only():
    x = jnp.ones((3, 4, 64))

    def noise(seed=0, step=5, samples=(7, 8, 9), layer=2, site=1):
        whole = ForwardContext(
            jnp.zeros((3, 4), jnp.int32),
            dropout_rate=0.5,
            noise_b=sample_noise(seed, step, jnp.uint32(samples)),
        )
        return np.asarray(whole.at_layer(jnp.int32(layer)).dropout(x, site))

    base = noise()
    assert set(np.unique(base)) == {0.0, 2.0} and 0.4 < np.mean(base == 0) < 0.6
    for change in ({"seed": 1}, {"step": 6}, {"layer": 3}, {"site": 2}, {"samples": (17, 18, 19)}):
        assert np.mean(noise(**change) == base) < 0.6, change
    assert np.array_equal(noise(samples=(9, 7, 8)), base[[2, 0, 1]]), (
        "a sample keeps its noise wherever it is put"
    )


def test_initial_values_and_noise_never_share_a_key():
    noise = {
        tuple(np.asarray(jax.random.key_data(jax.random.fold_in(random_key(3, "noise"), n))))
        for n in range(50)
    }
    init = {
        tuple(np.asarray(jax.random.key_data(jax.random.fold_in(random_key(3, "init"), n))))
        for n in range(50)
    }
    assert len(noise | init) == 100


def test_evaluation_has_no_dropout():
    x = jnp.ones((1, T, 8))
    assert context(dropout_rate=0.5).dropout(x, 0) is x


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("family", "parts"),
    [(GPT, {}), (LLAMA, {}), (GPT, {"mlp": Layered})],
    ids=["gpt", "llama", "a part with a side loss that knows its layer"],
)
def test_token_by_token_with_a_cache_gives_the_logits_of_the_whole(family, parts):
    config, blueprint, params = build(*family, **parts)
    want = logits(family, draw(2), **parts)
    cache = empty_cache(config.model, (2, T))
    extend = jax.jit(
        lambda params, tokens, at, cache: blueprint.bind(params).extend(
            tokens, ForwardContext(at), cache
        )
    )
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, T)):
        positions = jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32), (2, stop - start))
        got, cache = extend(params, draw(2)[:, start:stop], positions, cache)
        np.testing.assert_allclose(got, want[:, stop - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kinds", [Numbered, [Numbered, Numbered]], ids=["one kind", "rounds"])
def test_a_block_is_told_the_number_of_its_layer(kinds):
    with nnx.use_eager_sharding(False):
        blocks = Stack(kinds, 4, nnx.Rngs(0))
    assert blocks(jnp.ones(3), context())[1] == {"tens": 1111}


def test_norms_equal_their_formulas():
    ctx = ForwardContext(jnp.zeros((2, 5), jnp.int32))
    x = 3 + 2 * jax.random.normal(jax.random.key(0), (2, 5, 32))
    with nnx.use_eager_sharding(False):
        layernorm, rmsnorm = (Norm(tiny(*family).model) for family in (GPT, LLAMA))
    np.testing.assert_allclose(
        layernorm(x, ctx),
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        rmsnorm(x, ctx),
        x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-5),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rotary_scores_depend_on_distance_only():
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 1, 16))

    def score(at, to):
        return float(
            jnp.sum(rotate(q, jnp.full((1, 1), at), 1e4) * rotate(k, jnp.full((1, 1), to), 1e4))
        )

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-2)


@pytest.mark.seconds
def test_bfloat16_compute_stays_near_float32_and_keeps_float32_masters():
    half, state, _ = trained("precision.compute=bfloat16", "model.vocab=64", steps=10)
    full = trained("model.vocab=64", steps=10)[0]
    assert np.max(np.abs(half - full) / full) < 0.02
    assert not np.array_equal(half, full)
    assert all(value.dtype == jnp.float32 for value in state.params.values())
