"""Layers that read keys and values of earlier ones: whatever a backward pass recomputes, the
gradients are the same, and what they do not go with is one line.
"""

from functools import cache

import pytest
from helpers import tiny
from test_families import apart, rich_gradients

from spmdtrain.config.errors import ConfigError

WINDOWS = ("model.name=llama", "model.layers=4", "model.windows=5,0")


@cache
def with_remat(policy: str):
    return rich_gradients("sharing", f"train.remat={policy}", "mesh.fsdp=2", "train.microbatch=4")


@pytest.mark.long
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_gradients_are_the_same_whatever_is_recomputed(policy):
    _, got = with_remat(policy)
    _, want = with_remat("none")
    far = {path: apart(got[path], want[path]) for path in want}
    assert max(far.values()) <= 2e-6, far


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.shared_keys=3",), "leaves no layer of each kind"),
        (("model.shared_ffn=8",), "set model.shared_keys"),
        (("model.idle_keys=true",), "set model.shared_keys"),
        (
            ("model.shared_keys=1", "model.experts.count=4", "model.experts.chosen=2")
            + ("model.experts.every=2",),
            "needs experts in all layers or in none",
        ),
        (("model.shared_keys=1", "model.sinks=true"), "does not go with"),
        (("model.shared_keys=1", "mesh.pipeline=2"), "set mesh.pipeline=1"),
        (("model.token_layers.dim=2", "mesh.pipeline=2"), "set mesh.pipeline=1"),
        (("model.token_layers.dim=2", "model.mlp=gelu"), "the activation of its gate"),
        (("model.full.kv_heads=3",), "is not a multiple of"),
        (("model.full.head_dim=7",), "must be even"),
        (("model.full.head_dim=8", "model.windows=5"), "read by no layer"),
    ],
)
def test_what_they_do_not_go_with_is_one_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny(*WINDOWS, *settings)


def test_a_mesh_that_does_not_divide_the_heads_of_full_layers_is_refused():
    one_head = ("model.full.kv_heads=1", "model.full.keys_are_values=false", "mesh.tensor=2")
    with pytest.raises(ConfigError):
        rich_gradients("own", *one_head)
