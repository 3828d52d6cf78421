"""Attention that reads queries, keys and values in place, inside a step on any mesh.

On the CPU a stand-in takes the place of the kernels: XLA's attention, behind their arguments.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_gradients_of_one_device, gradients, pipeline

from pallas_kernels.attention import joined, xla
from spmdtrain.models.layers.attention import attend

NUMBERS = ("model.heads=4", "model.kv_heads=2")
PLACEMENTS = {
    "one device": (),
    "heads split": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "stages": pipeline(2, ("tensor",), "1f1b", 1, 2, "none"),
}


def forward(problem, inputs, *, joined_btknd):
    del joined_btknd
    return xla.forward(problem, inputs)


def joined_backward(problem, inputs, joined_btknd, results, dout):
    out, lse = results
    b, t, k, n, d = joined_btknd.shape
    dq, dk, dv, _ = xla.backward(problem, inputs, out, lse, dout, jnp.zeros_like(lse))
    parts = dq.reshape(b, t, k, n - 2, d), dk[..., None, :], dv[..., None, :]
    whole = jnp.concatenate(parts, -2)
    return whole, whole.astype(jnp.float32).sum((0, 1))


@pytest.fixture
def shapes(monkeypatch):
    """The shapes that the stand-in is called with."""
    shapes = []

    def counted(*arguments, joined_btknd):
        shapes.append(joined_btknd.shape)
        return forward(*arguments, joined_btknd=joined_btknd)

    module = SimpleNamespace(forward=counted, joined_backward=joined_backward)
    monkeypatch.setattr(attend, "may_read_in_place", lambda: True)
    monkeypatch.setattr(joined, "READERS", ("xla",))
    monkeypatch.setattr(joined, "chosen_form", lambda *_: joined.IN_PLACE)
    monkeypatch.setattr(joined, "implementation_of", lambda _: (module, {}))
    return shapes


@pytest.mark.long
@pytest.mark.parametrize("name", PLACEMENTS)
def test_gradients_are_those_of_attention_to_the_parts(name, request):
    assert_gradients_of_one_device(NUMBERS, (), 0)  # the parts, on one device
    shapes = request.getfixturevalue("shapes")
    jax.clear_caches()
    # Without a setting of its own, one device would not be run again.
    assert_gradients_of_one_device(NUMBERS, (*PLACEMENTS[name], "train.steps=21"), 2e-5)
    assert {shape[2:] for shape in shapes} == {(2 if name == "one device" else 1, 4, 4)}


@pytest.mark.parametrize(
    "settings",
    [
        ("model.positions=rope",),
        ("model.query_norm=head",),
        ("model.output_gate=head",),
        ("mesh.context=2",),
    ],
    ids=" ".join,
)
def test_who_changes_queries_or_keys_does_not_read_them_in_place(settings, shapes):
    gradients((*NUMBERS, "train.steps=22", *settings))
    assert shapes == []
