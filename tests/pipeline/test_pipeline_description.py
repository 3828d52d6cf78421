"""The line that a run with a pipeline begins with."""

import pytest

from spmdtrain.pipeline.draw import describe_pipeline
from spmdtrain.pipeline.schedule import one_f_one_b
from spmdtrain.pipeline.stage_layout import StageLayout

PADS = "7 layers in 8 places, 14% more layer work"
SHRINKS = "a smaller train.microbatch makes more of them, and the bubble smaller"


@pytest.mark.parametrize(
    ("layers", "microbatches", "said"),
    [(8, 4, []), (7, 4, [PADS]), (8, 1, [SHRINKS]), (7, 1, [PADS, SHRINKS])],
)
def test_it_says_what_padding_costs_and_how_the_bubble_shrinks(layers, microbatches, said):
    layout = StageLayout(chunks=1, stages=2, per_chunk=4, layers=layers)
    sizes, *more = describe_pipeline(one_f_one_b(2, microbatches), layout).split("; ")
    assert sizes.startswith("1f1b: 2 stages")
    assert more == said


def test_rounds_are_not_called_layers():
    layout = StageLayout(chunks=1, stages=4, per_chunk=1, layers=2)
    line = describe_pipeline(one_f_one_b(4, 4), layout, of_round=4)
    assert line.endswith("2 rounds of 4 layers in 4 places, 100% more layer work")
