"""Zeros behind the dims that a mesh does not divide."""

import math

import jax
import numpy as np
import pytest
from helpers import prepared, tiny, trained
from hypothesis import given, settings
from hypothesis import strategies as some
from jax.sharding import AbstractMesh

import spmdtrain as st
from spmdtrain.config.schema import RulesConfig
from spmdtrain.inference.sample import Choice
from spmdtrain.parallel.axes import make_rules
from spmdtrain.parallel.mesh import AXES
from spmdtrain.parallel.padding import Padding, pad_vocabulary
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard_on

SHAPES = some.lists(some.tuples(some.integers(1, 5), some.integers(0, 3)), min_size=1, max_size=4)


@pytest.mark.core
@pytest.mark.seconds
@settings(max_examples=20)
@given(SHAPES)
def test_what_was_padded_comes_back_and_the_rest_are_zeros(dims):
    smaller = tuple(size for size, _ in dims)
    larger = tuple(size + more for size, more in dims)
    padding = Padding({"w": smaller}, {"w": smaller}, {"w": larger})
    x = 1 + np.arange(math.prod(smaller), dtype=np.float32).reshape(smaller)
    rests = padding.to_rest("w", x)
    assert rests.shape == larger
    assert np.sum(np.asarray(rests) != 0) == x.size
    assert np.array_equal(padding.from_rest("w", rests), x)
    tree = {"moment": x, "count": np.float32(3)}
    again = padding.tree_from_rest("w", padding.tree_to_rest("w", tree))
    assert np.array_equal(again["moment"], x)
    assert again["count"] == 3


@given(some.integers(1, 300), some.fixed_dictionaries({axis: some.integers(1, 8) for axis in AXES}))
def test_a_vocabulary_gets_the_fewest_rows_that_all_its_devices_share_alike(vocab, sizes):
    rules = make_rules(RulesConfig(), sizes)
    shape = pad_vocabulary(("vocab", "embed", None), (vocab, 7, 3), rules)
    ways = sizes["pipeline"] * sizes["tensor"]
    assert shape[1:] == (7, 3)
    assert shape[0] % ways == 0
    assert vocab <= shape[0] < vocab + ways


@pytest.mark.parametrize(
    ("parameters", "activations"),
    [({"vocab": ("fsdp",)}, {}), ({"vocab": ()}, {}), ({"vocab": ("tensor",)}, {"vocab": ()})],
)
def test_a_vocabulary_fits_both_tables_of_rules(parameters, activations):
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 4, "tensor": 6}
    rules = make_rules(RulesConfig(parameters=parameters, activations=activations), sizes)
    shape = pad_vocabulary(("vocab", "embed"), (67, 8), rules)
    rules.parameter_spec(("vocab", None), shape, "table")
    rules.activation_spec((None, "vocab"), (1, shape[0]))


@pytest.mark.parametrize("data", [3, 5, 6, 7])
@pytest.mark.parametrize("tensor", [1, 8])
def test_zero_leaves_less_than_one_percent_whole_where_nothing_divides(data, tensor):
    """Biases that `tensor` splits stay whole; in a model of a real width they are few."""
    sizes = dict.fromkeys(AXES, 1) | {"data": data, "tensor": tensor}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    width = () if tensor == 1 else ("model.embed=1024", "model.heads=16")
    config = tiny("train.zero=1", f"train.global_batch={2 * data}", "model.vocab=67", *width)
    setup = shard_on(config, mesh)
    size = {path: each.size for path, each in setup.model.parameters.items()}
    whole = sum(size[path] for path, spec in setup.specs.items() if "data" not in spec)
    assert whole < 0.01 * sum(size.values())
    moments = [x for x in jax.tree.leaves(setup.state.opt_state) if x.ndim]
    on_one = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in moments)
    assert on_one * data * tensor < 2.2 * sum(size.values())  # two moments, and a tenth of padding


ODD = ("model.vocab=67", "train.global_batch=12", "optimizer.name=adafactor")
PADDED = ("mesh.data=3", "mesh.tensor=2", "train.zero=1")


@pytest.mark.long
def test_padding_stays_zero_and_is_seen_by_no_optimizer():
    """Adafactor takes means over a whole weight, which padding would make smaller."""
    want = trained(*ODD, steps=4)[0]
    got, state, _ = trained(*ODD, *PADDED, steps=4)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    padding = prepared(*ODD, *PADDED).padding
    padded = {path for path in padding.at_rest if padding.at_rest[path] != padding.of_model[path]}
    assert "tokens.table_ve" in padded
    for path in padded:
        x = np.asarray(state.params[path])
        assert np.array_equal(padding.to_rest(path, padding.from_rest(path, x)), x), path


@pytest.mark.seconds
def test_initial_values_do_not_depend_on_padding():
    """To the bit, and so are those that an optimizer copies from the weights."""
    settings = (*ODD[:2], "optimizer.name=schedule_free_adamw")
    one, split = prepared(*settings), prepared(*settings, *PADDED)
    want, got, padding = init_state(one), init_state(split), split.padding
    assert padding.at_rest["tokens.table_ve"] != padding.of_model["tokens.table_ve"]
    for path, x in got.params.items():
        assert np.array_equal(padding.from_rest(path, x), want.params[path]), path
        kept = padding.tree_from_rest(path, got.opt_state[path])
        jax.tree.map(np.testing.assert_array_equal, kept, want.opt_state[path])


@pytest.mark.seconds
def test_text_and_logits_know_no_padding():
    """A padded row has the logit 0, as likely as any in a fresh model."""
    one = prepared("model.vocab=65")
    state = init_state(one)
    table = "tokens.table_ve"
    sunk = state.params | {
        table: state.params[table] - 10 * np.sign(np.asarray(state.params[table]).sum(0))
    }
    tokens = np.arange(12).reshape(2, 6)
    want = np.asarray(st.make_logits(one)(sunk, tokens))
    split = prepared("model.vocab=65", "mesh.tensor=4")
    here = {path: np.asarray(split.padding.to_rest(path, x)) for path, x in sunk.items()}
    got = np.asarray(st.make_logits(split)(here, tokens))
    assert got.shape == want.shape == (2, 6, 65)
    np.testing.assert_allclose(got, want, atol=1e-4)
    fresh = init_state(split).params  # their logits are all near 0, as that of padding is
    made = st.generate_ids(split, fresh, np.zeros((16, 2), np.int32), 14, choice=Choice(50.0))
    assert made.max() < 65
