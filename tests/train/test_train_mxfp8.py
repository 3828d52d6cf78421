"""Training in blocks of 8-bit floats: every mesh has the numbers of one device."""

import json

import numpy as np
import pytest
from absent_gpu import needs_compiler, printed
from helpers import MESHES_OF_WEIGHTS, gradients, prepared

from spmdtrain.config import ConfigError
from spmdtrain.models.layers.narrow import BlockWeight
from spmdtrain.models.projection import matmul_weights

BLOCKS = (  # of which every device has whole ones on these meshes
    "model.embed=64",
    "model.heads=2",
    "model.vocab=32",
    "train.sequence_length=64",
    "train.global_batch=8",
)
MXFP8 = "precision.matmul=mxfp8"


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.long
@pytest.mark.parametrize("layout", MESHES_OF_WEIGHTS)
def test_gradients_are_those_of_one_device(layout):
    """A block is rounded by itself, so where it lies changes nothing but the order of sums.

    Most meshes are within 1e-6. A number that a sum moves across the middle between two of e4m3
    moves those that follow from it: one mesh was off by 0.01 for that. Matmuls of the same numbers
    agree sharply: tests/parallel/test_mxfp8.py.
    """
    _, found = gradients((*BLOCKS, MXFP8), MESHES_OF_WEIGHTS[layout])
    _, want = gradients((*BLOCKS, MXFP8))
    for path, each in want.items():
        assert off(found[path], each) < 0.02, path


@pytest.mark.long
def test_gradients_are_near_those_of_float32():
    """They are off by up to 0.065. A key's bias has no gradient but rounding."""
    _, found = gradients((*BLOCKS, MXFP8))
    _, want = gradients(BLOCKS)
    for path, true in want.items():
        got = found[path]
        if path.endswith("qkv_bias"):
            got, true = np.delete(got, 1, 1), np.delete(true, 1, 1)
        assert off(got, true) < 0.1, path
    narrow = "blocks.layer.mlp.down_fe"
    assert off(found[narrow], want[narrow]) > 1e-3, "nothing was multiplied in 8 bits"


def test_a_run_may_turn_it_on_and_off():
    """The state that a checkpoint holds does not know of it."""
    assert prepared(*BLOCKS, MXFP8).state == prepared(*BLOCKS).state


def test_patterns_of_paths_stay_wide():
    model = prepared(*BLOCKS, MXFP8, "precision.wide=*.mlp.*").model.bind({})
    kinds = {path: type(getattr(module, name)) for path, module, name in matmul_weights(model)}
    narrow = {path for path, kind in kinds.items() if kind is BlockWeight}
    assert narrow == {path for path in kinds if ".attention." in path} != set()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (("model.embed=48", "model.heads=3"), "has 48 rows on a device"),
        (("mesh.tensor=4", "model.heads=4"), "attention.out_kgde has 16 rows on a device"),
        (("train.microbatch=1", "train.sequence_length=48"), "tokens of a microbatch on a device"),
        (("mesh.context=4", "train.microbatch=1"), "found 16 tokens"),
    ],
)
def test_parts_that_are_not_whole_blocks_are_refused(settings, what):
    with pytest.raises(ConfigError) as refused:
        prepared(*BLOCKS, MXFP8, *settings)
    assert what in str(refused.value)
    assert "precision.matmul='mxfp8'" in str(refused.value)


# On a device f has 288 and 384 columns, and the output of attention 96 rows. Heads have 96 numbers,
# the vocabulary 32, so that no other matmul has these pairs.
WIDE = ("model.embed=192", "model.heads=2", "model.vocab=32", "train.sequence_length=64")
TEXT = """
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
import json, re, sys
from helpers import tiny
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import executable
config = tiny(*sys.argv[1:])
text = executable(config, dict(config.mesh.sizes), hardware("b200"))[0].as_text()
dots = [line for line in text.splitlines() if re.search(r" dot\\(|__cublas", line)]
shapes = [re.findall(r"\\[([\\d,]+)\\]", line.partition("metadata=")[0]) for line in dots]
shapes = [sorted({int(n) for shape in each for n in shape.split(",")}) for each in shapes]
print(json.dumps([text.count('custom_call_target="__cudnn$blockScaledDot"'), shapes]))
"""


@pytest.mark.long
@needs_compiler
def test_every_projection_is_cudnns_on_blackwell():
    """Forward and both gradients of four projections, on data x tensor, as compiled for B200."""
    narrow = ("mesh.data=2", "mesh.tensor=2", "precision.compute=bfloat16", MXFP8)
    calls, others = json.loads(printed(TEXT, *WIDE, *narrow).splitlines()[-1])
    assert calls == 12
    assert others, "no matmul of attention or the head was found: is the text read?"
    for sizes in map(set, others):
        assert not sizes & {288, 384}, sizes
        assert not sizes >= {96, 192}, sizes
