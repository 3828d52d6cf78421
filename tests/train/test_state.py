"""The shapes of a state, which a setup has before anything is made."""

import jax
import numpy as np
import pytest
from helpers import prepared

from spmdtrain.processes.xla_flags import LLVM_LEVEL, options_of_one_run
from spmdtrain.train import fresh, state

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


@pytest.mark.long
def test_the_first_weights_are_the_same_to_the_bit_however_long_llvm_works(monkeypatch):
    setup = prepared()
    monkeypatch.delenv("XLA_FLAGS")
    states = []
    for options in (options_of_one_run("cpu"), {LLVM_LEVEL: 3}):
        monkeypatch.setattr(fresh, "options_of_one_run", lambda _, these=options: these)
        states.append(fresh.init_state(setup))
    assert options_of_one_run("cpu") != options
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
