"""Pipelined gradients equal those of one device: every schedule and remat mode, with padding, noise
and masks.
"""

import pytest
from helpers import assert_gradients_of_one_device, pipeline, pipeline_name

pytestmark = pytest.mark.long

TOLERANCE = 1e-5  # float32
# Of six, some places are padding where p v does not divide it.
SIX, EIGHT = ("model.layers=6",), ("model.layers=8",)
NOISY = ("model.dropout=0.1",)
DOCUMENTS = ("data.packing=documents",)
UNTIED = ("model.tied=false",)
FURTHER = ("model.layers=2", "model.multi_token.depth=1", "model.multi_token.weight=0.5")
LLAMA = (
    "model.name=llama",
    *EIGHT,
    "model.embed=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.vocab=32",
)

CORE = [  # on both Pythons
    (SIX + NOISY, (2, ("data", "fsdp"), "interleaved", 3, 2, "none")),
    (SIX + DOCUMENTS, (2, ("fsdp", "tensor"), "1f1b", 1, 4, "dots")),
    (EIGHT + DOCUMENTS, (4, ("fsdp",), "zero_bubble", 2, 2, "none")),
]
OTHERS = [
    (SIX, (2, ("data", "tensor"), "interleaved", 3, 2, "full")),
    (SIX, (2, ("fsdp", "tensor"), "zero_bubble", 3, 2, "none")),
    (SIX + DOCUMENTS, (2, ("data", "tensor"), "gpipe", 1, 2, "dots")),
    (SIX + UNTIED, (2, ("data",), "interleaved", 2, 4, "dots")),
    (SIX + UNTIED, (2, ("tensor",), "gpipe", 1, 4, "none")),
    (SIX + DOCUMENTS, (2, ("fsdp", "expert"), "1f1b", 1, 2, "none")),
    (EIGHT + NOISY, (4, ("data",), "1f1b", 1, 2, "full")),
    (EIGHT + DOCUMENTS, (4, ("tensor",), "zero_bubble", 1, 4, "none")),
    (EIGHT + UNTIED, (4, ("tensor",), "1f1b", 1, 1, "none")),
    (EIGHT, (4, ("fsdp",), "gpipe", 1, 4, "dots")),
    (LLAMA, (4, ("tensor",), "1f1b", 1, 4, "dots")),
    (LLAMA + DOCUMENTS, (4, ("data",), "interleaved", 2, 1, "full")),
    (EIGHT, (8, (), "gpipe", 1, 1, "none")),
    (SIX, (4, ("data",), "interleaved", 3, 1, "full")),  # 12 places for 6 layers
    (SIX + NOISY, (8, (), "zero_bubble", 1, 4, "none")),
    (SIX + DOCUMENTS, (4, (), "interleaved", 1, 2, "dots")),
    (FURTHER, (2, (), "zero_bubble", 1, 2, "none")),
]
# Beside cases that differ in little, and in the grid of test_pipeline_grid.py.
ALIKE = [
    (SIX, (2, (), "1f1b", 1, 1, "none")),
    (FURTHER, (2, ("fsdp",), "1f1b", 1, 1, "full")),
    (FURTHER, (2, ("tensor",), "interleaved", 1, 2, "dots")),
    (SIX, (2, ("data", "fsdp"), "gpipe", 1, 1, "full")),
    (SIX, (2, ("fsdp",), "zero_bubble", 2, 4, "none")),
    (EIGHT, (4, (), "interleaved", 2, 4, "full")),
    (EIGHT, (4, ("data",), "interleaved", 2, 2, "none")),
    (EIGHT, (4, ("tensor",), "interleaved", 2, 2, "dots")),
    (EIGHT, (8, (), "1f1b", 1, 2, "full")),
]


@pytest.mark.parametrize(
    ("numbers", "case"),
    [
        *(pytest.param(*each, marks=pytest.mark.core) for each in CORE),
        *OTHERS,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ALIKE),
    ],
    ids=pipeline_name,
)
def test_gradients_are_those_of_one_device(numbers, case):
    assert_gradients_of_one_device(numbers, pipeline(*case), TOLERANCE)


@pytest.mark.parametrize("order", ["expert,fsdp", "fsdp,expert"])
@pytest.mark.parametrize("dim", ["embed", "ffn"])
def test_gradients_are_those_of_one_device_in_whatever_order_axes_split_a_dim(dim, order):
    """Each device gets its own slice: major axis first."""
    split = (f"rules.parameters.{name}={order if name == dim else ''}" for name in ("embed", "ffn"))
    layout = (*pipeline(2, ("fsdp", "expert"), "1f1b", 1, 2, "none"), *split)
    assert_gradients_of_one_device(SIX, layout, TOLERANCE)
