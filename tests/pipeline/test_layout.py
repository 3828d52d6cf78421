"""Stacks in pipeline layout: one reshape there and back, every layer on the stage that runs it."""

import numpy as np
import pytest

from spmdtrain.pipeline.stage_layout import lay_out


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"), [(8, 4, 2), (7, 4, 1), (5, 2, 3), (3, 8, 1), (6, 1, 1)]
)
def test_a_stack_comes_back_from_any_layout_and_lies_where_it_runs(layers, stages, chunks):
    layout = lay_out(layers, stages, chunks)
    stack = np.arange(layers * 2).reshape(layers, 2)
    staged = np.asarray(layout.staged(stack))
    assert staged.shape == (*layout.shape, 2)
    assert np.array_equal(layout.unstaged(staged), stack)
    if stages == 1:
        return
    for chunk, stage, place in np.ndindex(*layout.shape):
        number = (chunk * stages + stage) * layout.per_chunk + place
        assert np.array_equal(staged[chunk, stage, place], stack[min(number, layers - 1)])


def test_padding_is_the_least_that_makes_chunks_equal():
    assert (lay_out(8, 4, 2).padding, lay_out(7, 4, 1).padding, lay_out(6, 4, 3).padding) == (
        0,
        1,
        6,
    )
    assert lay_out(6, 4, 1).per_chunk == 2


def test_one_stage_has_one_chunk_and_no_padding():
    layout = lay_out(5, 1, 3)
    assert (layout.shape, layout.axes, layout.padding) == ((5,), ("layer",), 0)
