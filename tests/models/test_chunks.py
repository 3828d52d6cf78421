"""Attention that stays within blocks of positions, which begin anew with each document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import draw_params, rich
from family_oracle import logits as logits_by_definition
from helpers import prepared, tiny

from spmdtrain.config import ConfigError
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.chunks import block_ids, share_of_window
from spmdtrain.models.layers.attention.rotated_norm import RotatedNorm
from spmdtrain.models.layers.cache import empty_cache
from spmdtrain.models.logits import logits_of
from spmdtrain.models.size import seen_pairs

LENGTHS = (7, 14, 1, 11)  # of documents; blocks have 6 and 5 tokens


def test_tokens_of_a_segment_share_their_document_and_their_block():
    positions_bt = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    segments_bt = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    got = block_ids((2, 0, 3), 0, positions_bt, segments_bt, 6)
    np.testing.assert_array_equal(got[0], [0, 0, 1, 1, 3, 3, 4, 4, 5, 5])
    got = block_ids((2, 0, 3), jnp.int32(1), positions_bt, segments_bt, 6)
    np.testing.assert_array_equal(np.diff(got[0]) != 0, np.diff(segments_bt[0]) != 0)
    np.testing.assert_array_equal(block_ids((3,), None, positions_bt)[0, :5], [0, 0, 0, 1, 0])


def by_count(length: int, chunk: int) -> int:
    return sum(place % chunk + 1 for place in range(length))


@pytest.mark.parametrize(("length", "chunk"), [(12, 5), (12, 4), (12, 11), (40, 12), (5, 1)])
def test_the_pairs_within_blocks_are_counted(length, chunk):
    assert seen_pairs(length, chunk=chunk) == by_count(length, chunk)
    within_window = sum(min(place + 1, chunk) for place in range(length))
    assert share_of_window(length, chunk) == pytest.approx(by_count(length, chunk) / within_window)


def test_the_norm_behind_rope_counts_small_queries_by_its_epsilon():
    """And leaves layers without rotary positions alone."""
    norm = RotatedNorm(1e-3, (True, False))
    x = np.random.default_rng(0).standard_normal((1, 2, 1, 3, 4)).astype(np.float32) * 1e-2
    ctx = ForwardContext(jnp.zeros((1, 2), jnp.int32))
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(norm(jnp.asarray(x), ctx.at_layer(0)), wanted, rtol=1e-6)
    np.testing.assert_array_equal(norm(jnp.asarray(x), ctx.at_layer(1)), x)


@pytest.fixture(scope="module")
def packed():
    """(model, params, logits of rows [b, t, v] with the lengths of their documents)."""
    setup = prepared(*rich("chunked"), "train.sequence_length=33", "model.max_length=40")
    params = draw_params(setup.model, 0.0)

    @jax.jit
    def run(params, tokens_bt, positions_bt, segments_bt):
        module = setup.model.bind(params)
        ctx = ForwardContext(positions_bt, segments_bt)
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        return logits_of(*module.head(x_bte, ctx))

    def logits(tokens_bt: np.ndarray, lengths=LENGTHS) -> np.ndarray:
        positions = np.concatenate([np.arange(n) for n in lengths])
        segments = np.repeat(np.arange(len(lengths)), lengths)
        both = (np.broadcast_to(x, tokens_bt.shape).astype(np.int32) for x in (positions, segments))
        return np.asarray(run(params, tokens_bt, *both), np.float64)

    return setup.config.model, params, logits


@pytest.mark.seconds
def test_documents_of_one_row_are_as_each_alone(packed):
    """transformers takes blocks and temperature from the row: it is wrong there."""
    model, params, logits = packed
    tokens_bt = np.random.default_rng(4).integers(0, model.vocab, (2, sum(LENGTHS)))
    got, start = logits(tokens_bt), 0
    for length in LENGTHS:
        part = slice(start, start + length)
        wanted = logits_by_definition(model, params, tokens_bt[:, part])
        difference = np.sqrt(((got[:, part] - wanted) ** 2).mean() / (wanted**2).mean())
        assert difference < 5e-6, length
        start += length


@pytest.mark.seconds
def test_the_last_token_of_a_document_moves_no_bit_of_the_others(packed):
    model, _, logits = packed
    tokens_bt = np.random.default_rng(4).integers(0, model.vocab, (2, sum(LENGTHS)))
    other_bt = tokens_bt.copy()
    other_bt[:, LENGTHS[0] - 1] = (other_bt[:, LENGTHS[0] - 1] + 1) % model.vocab
    first, second = logits(tokens_bt), logits(other_bt)
    np.testing.assert_array_equal(first[:, LENGTHS[0] :], second[:, LENGTHS[0] :])
    assert np.abs(first - second).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("splits", [(11, 12), (4, 15), (1, 13)])
def test_a_cache_that_is_filled_in_any_parts_has_the_logits_of_the_whole(splits, packed):
    model, params, _ = packed
    setup = prepared(*rich("chunked"), "train.sequence_length=33", "model.max_length=40")
    tokens_bt = np.random.default_rng(5).integers(0, model.vocab, (2, 16))
    wanted = logits_by_definition(model, params, tokens_bt)

    @jax.jit
    def extend(tokens_bt, cache):
        positions = cache.length + jnp.arange(tokens_bt.shape[1])
        ctx = ForwardContext(jnp.broadcast_to(positions, tokens_bt.shape))
        return setup.model.bind(params).extend(tokens_bt, ctx, cache)

    cache, start = empty_cache(model, (2, 16)), 0
    for stop in (*splits, 16):
        got, cache = extend(tokens_bt[:, start:stop], cache)
        difference = np.asarray(got, np.float64) - wanted[:, stop - 1]
        assert np.sqrt((difference**2).mean() / (wanted[:, stop - 1] ** 2).mean()) < 3e-6
        start = stop


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("model.chunks=4", "model.windows=3"), "layer 0 has a window of 3 and blocks of 4"),
        (("model.query_norm=after", "model.positions=learned"), "needs model.positions='rope'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, line):
    with pytest.raises(ConfigError, match=line):
        tiny("model.name=llama", *settings)
