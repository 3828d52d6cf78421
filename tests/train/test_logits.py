"""Logits in bfloat16 train as those in float32 do, on every mesh."""

import numpy as np
import pytest
from helpers import MESHES, tiny, trained

from spmdtrain.config import ConfigError

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


def test_they_belong_to_bfloat16_matmuls():
    with pytest.raises(ConfigError, match="precision.compute='bfloat16'"):
        tiny(NARROW[1])
