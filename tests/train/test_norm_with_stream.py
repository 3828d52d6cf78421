"""Norms that add the gradient of the residual stream to their own, inside a step on any mesh.

They do where our kernels run; here XLA's norm does the same, behind the same arguments.
"""

import jax
import pytest
from helpers import assert_gradients_of_one_device, pipeline

from spmdtrain.models.layers import norm

PLACEMENTS = {
    "one device": (),
    "stream split": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "stages": pipeline(2, ("tensor",), "1f1b", 1, 2, "dots"),
}
NUMBERS = ("model.ffn=24",)


@pytest.mark.long
@pytest.mark.parametrize("name", PLACEMENTS)
def test_gradients_are_those_of_a_norm_alone(name, monkeypatch):
    assert_gradients_of_one_device(NUMBERS, (), 0)  # alone
    calls = []

    def layernorm(*arrays, returns_x, **options):
        calls.append(returns_x)
        return real(*arrays, returns_x=returns_x, **options)

    real = norm.layernorm
    monkeypatch.setattr(norm, "layernorm", layernorm)
    monkeypatch.setattr(norm, "no_gpu", lambda _: "")
    jax.clear_caches()
    # Without a setting of its own, one device would not be run again.
    assert_gradients_of_one_device(NUMBERS, (*PLACEMENTS[name], "train.steps=21"), 2e-5)
    assert calls.count(True) >= 2
