"""What hooks of a part measure or only show has no gradient, without a pipeline and with one."""

import jax
import numpy as np
import pytest
from helpers import batches_of, prepared

from spmdtrain.train import all_parts
from spmdtrain.train.all_parts import Feature
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.part import Part, measured
from spmdtrain.train.step import make_gradients

pytestmark = pytest.mark.long

SMALL = ("model.embed=8", "model.heads=2", "train.sequence_length=4", "train.global_batch=8")
LAYOUTS = {"one device": (), "pipeline": ("mesh.pipeline=2", "train.microbatch=4")}


def around(run, x, ctx):  # noqa: ARG001
    y, losses = run(x)
    return y, losses | {measured("layers"): (y**2).sum(), "shown_of_layers": (y**2).sum()}


def side_losses(module, x_bte, ctx, microbatch):  # noqa: ARG001
    return {measured("head"): (x_bte**2).sum((0, 1)), "shown_of_head": (x_bte**2).sum()}


MEASURING = Part(
    "measuring",
    make_layer=lambda setup: around,  # noqa: ARG005
    make_side_losses=lambda setup, table_axes: side_losses,  # noqa: ARG005
    shown=("shown_of_layers", "shown_of_head"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_measured_or_shown_has_no_gradient(layout, monkeypatch):
    def gradients() -> dict[str, np.ndarray]:
        setup = prepared(*SMALL, *LAYOUTS[layout])
        state = init_state(setup)
        with batches_of(setup) as ahead:
            gradients_found, sums = jax.jit(make_gradients(setup))(
                state.params, state.step, next(ahead)
            )
        seen.append(sums.keys())
        return plain_arrays(setup, gradients_found)

    seen: list = []
    plain = gradients()
    feature = Feature(lambda _: True, lambda: MEASURING)
    monkeypatch.setattr(all_parts, "FEATURES", (*all_parts.FEATURES, feature))
    measuring = gradients()
    assert seen[1] - seen[0] == {"shown_of_layers", "shown_of_head"}
    for path, x in plain.items():
        largest = np.abs(x).max()
        np.testing.assert_allclose(measuring[path], x, rtol=0, atol=1e-6 * largest, err_msg=path)
