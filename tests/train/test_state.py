"""The shapes of a state, which a setup has before anything is made."""

import jax
import pytest
from helpers import prepared

from spmdtrain.train import state

EXPERTS = ("model.experts.count=4", "model.experts.chosen=2")


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("precision.params=bfloat16", "optimizer.moment_dtype=8bit"),
        ("model.layers=3", "mesh.pipeline=2", "train.microbatch=1", "optimizer.name=muon"),
        EXPERTS,
        (
            "finetune.kind=dora",
            "finetune.rank=2",
            "finetune.base=int8",
            "precision.frozen=bfloat16",
        ),
    ],
    ids=["plain", "few bits", "padded stages", "experts", "adapters on integers"],
)
def test_shapes_are_those_of_a_model_that_is_made(settings):
    setup = prepared(*settings)
    of_setup = setup.model, setup.update_rules, setup.config
    made = jax.eval_shape(lambda key: state._fresh(*of_setup, key), jax.random.key(0))
    assert state.fresh_shapes(*of_setup) == made
