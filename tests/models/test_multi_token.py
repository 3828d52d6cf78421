"""Tokens after the next one: their losses are those of numpy, and they have the right targets."""

import jax
import numpy as np
import pytest
from families import draw_params, rich
from family_oracle import further_logits
from helpers import batches_of, prepared, tiny

from spmdtrain.config import ConfigError
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.transformer import Transformer
from spmdtrain.parallel.context.context_method import ContextMethod, zigzag_order
from spmdtrain.train.compared.in_order import placed_arrays
from spmdtrain.train.gradients.further_losses import NAME, at_depth
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_gradients, make_losses


@pytest.mark.long
@pytest.mark.parametrize("after_norm", ["false", "true"])
def test_the_losses_are_those_of_the_definition(after_norm):
    setup = prepared(*rich("further"), f"model.multi_token.after_norm={after_norm}")
    model = setup.config.model
    drawn = jax.device_get(draw_params(setup.model))
    params = placed_arrays(setup, drawn)
    step = jax.device_put(np.int32(0), setup.state.step.sharding)
    with batches_of(setup) as ahead:
        batch = next(ahead)
    _, sums = jax.device_get(jax.jit(make_gradients(setup))(params, step, batch))
    tokens_bt, targets_bt = (np.asarray(batch[name][0]) for name in ("tokens", "targets"))
    losses = []
    for depth, found in enumerate(further_logits(model, drawn, tokens_bt), 1):
        chosen = np.take_along_axis(found, targets_bt[:, depth:, None], -1)[..., 0]
        losses.append((np.log(np.exp(found).sum(-1)) - chosen).sum())
    assert sums[NAME] == pytest.approx(0.5 * np.mean(losses), rel=2e-6)
    evaluated = jax.device_get(jax.jit(make_losses(setup))(params, batch))
    assert NAME not in evaluated  # only training predicts further


@pytest.mark.parametrize("ways", [1, 2])
def test_a_target_is_of_the_same_document_and_has_a_loss_itself(ways):
    length = 8
    rows = {
        "targets": np.arange(10, 10 + length),
        "mask": np.array([1, 1, 0, 1, 1, 1, 1, 1]),
        "segment_ids": np.array([1, 1, 1, 1, 2, 2, 2, 2]),
    }
    order = zigzag_order(length, ways)
    ctx = ForwardContext(np.arange(length)[None], context_method=ContextMethod("ring", (), ways))
    found = at_depth({name: x[None, order] for name, x in rows.items()}, 2, ctx)
    natural = {name: np.asarray(x)[0, np.argsort(order)] for name, x in found.items()}
    np.testing.assert_array_equal(natural["mask"], [0, 1, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(natural["targets"][:6], rows["targets"][2:])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("train.preference=orpo", "data.corpus=tokens", "data.path=pairs.bin"),
            "whole answers",
        ),
    ],
)
def test_what_cannot_predict_further_is_refused(settings, said):
    with pytest.raises(ConfigError, match=f"{said}.*multi_token=none"):
        prepared(*rich("further"), "data.packing=best_fit", *settings)


class WithoutFurther(Transformer):
    """A model whose author has not thought of further tokens."""

    def __getattribute__(self, name: str):
        if name == "predict_further":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Restoring(Transformer):
    """A model that restores tokens."""

    def corrupt(self, tokens, targets, mask, key):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "said"),
    [(WithoutFurther, "has no predict_further"), (Restoring, "restores tokens")],
)
def test_a_model_that_has_no_way_to_predict_further_is_refused(make, said):
    with pytest.raises(ConfigError, match=f"{said}.*multi_token=none"):
        shard(tiny(*rich("further")), make, jax.devices()[:1])
