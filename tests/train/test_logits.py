"""Logits in bfloat16 train as those in float32 do, on every mesh."""

import numpy as np
import pytest
from helpers import MESHES, tiny, trained

from spmdtrain.config import ConfigError
from spmdtrain.train.items.items import NO_ITEMS
from spmdtrain.train.token_loss import choose

NARROW = ("precision.compute=bfloat16", "precision.logits=bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data 2 fsdp 2 tensor 2"])
def test_losses_are_those_of_float32_logits(mesh):
    wide, _, _ = trained(*MESHES[mesh], NARROW[0], steps=8)
    narrow, _, _ = trained(*MESHES[mesh], *NARROW, steps=8)
    alone, _, _ = trained(*NARROW, steps=8)
    np.testing.assert_allclose(narrow, wide, rtol=2e-3)
    np.testing.assert_allclose(narrow, alone, rtol=5e-3)
    assert np.any(narrow != wide), "the setting does nothing"


@pytest.mark.parametrize(
    "settings",
    [
        ("train.preference=dpo", "data.corpus=tokens", "data.path=a", "data.packing=best_fit"),
        ("distill.teacher=a",),
    ],
)
def test_a_loss_that_takes_float32_logits_refuses_others(settings):
    with pytest.raises(ConfigError, match="takes its loss from logits in float32"):
        tiny(*NARROW, *settings)


def test_a_loss_of_ones_own_refuses_them():
    with pytest.raises(ConfigError, match="the shipped loss"):
        choose(tiny(*NARROW), lambda logits, targets: logits[..., 0] * targets, NO_ITEMS)


def test_they_belong_to_bfloat16_matmuls():
    with pytest.raises(ConfigError, match="precision.compute='bfloat16'"):
        tiny(NARROW[1])
