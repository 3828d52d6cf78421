"""The loss of tokens: the settings that shape it, and one of one's own, on one device and on
meshes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import batches_of, mesh_of, tiny

from spmdtrain.config import ConfigError
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_eval_step, make_step

pytestmark = pytest.mark.long

Z = 0.5
UNEVEN = ("data.packing=documents",)
MESHES = {
    "one device": (),
    "context and tensor": ("mesh.data=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2"),
    "pipeline": ("mesh.pipeline=2", "mesh.tensor=2", "mesh.fsdp=2", "train.microbatch=2"),
}


def cross_entropy(logits, targets):
    """Plain, with z-loss beside it, and a figure that is only to be seen."""
    lse = jax.nn.logsumexp(logits, -1)
    at_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    right = (logits.argmax(-1) == targets).astype(jnp.float32)
    return {"loss": lse - at_target, "z_loss": Z * lse**2, "accuracy": jax.lax.stop_gradient(right)}


def three_steps(*settings: str, loss=None) -> tuple[list[dict], float]:
    """The figures of three steps, and the evaluation of the last batch after them."""
    setup = shard(tiny(*UNEVEN, *settings), devices=jax.devices()[: mesh_of(settings)], loss=loss)
    state = init_state(setup)
    step = make_step(setup)
    figures = []
    with batches_of(setup) as ahead:
        for _ in range(3):
            batch = next(ahead)
            state, metrics = step(state, batch)
            figures.append(jax.device_get(metrics))
        summed, tokens = make_eval_step(setup)(state.params, batch)
    return figures, float(summed / tokens)


@pytest.fixture(scope="module")
def shipped():
    return three_steps(f"train.z_loss={Z}")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_of_ones_own_trains_as_the_same_one_that_is_shipped(mesh, shipped):
    figures, evaluated = three_steps(*MESHES[mesh], loss=cross_entropy)
    for got, want in zip(figures, shipped[0], strict=True):
        assert got.keys() == want.keys() | {"accuracy"}
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
        assert 0 <= got["accuracy"] <= 1
    assert evaluated == pytest.approx(shipped[1], rel=1e-5)


def test_z_loss_is_trained_on_and_not_part_of_the_loss_that_is_shown(shipped):
    plain, _ = three_steps()
    first = shipped[0][0]
    assert "z_loss" not in plain[0]
    # It is a difference: the whole sum less its z-loss, three times as large here.
    np.testing.assert_allclose(first["loss"], plain[0]["loss"], rtol=5e-6)
    assert abs(first["grad_norm"] / plain[0]["grad_norm"] - 1) > 1e-3
    lse_squared = [step["z_loss"] / Z for step in shipped[0]]
    assert lse_squared[2] < lse_squared[0]


def test_label_smoothing_shapes_training_and_not_evaluation():
    smooth, evaluated = three_steps("train.label_smoothing=0.2", "optimizer.learning_rate=1e-12")
    plain, expected = three_steps("optimizer.learning_rate=1e-12")
    assert abs(smooth[0]["grad_norm"] / plain[0]["grad_norm"] - 1) > 1e-2
    assert evaluated == pytest.approx(expected, rel=1e-6)


def nameless(logits, _):
    return {"cross_entropy": logits[..., 0]}


def summed(logits, _):
    return logits[..., 0].sum()


def called_tokens(logits, _):
    return {"loss": logits[..., 0], "tokens": logits[..., 1]}


def relative(logits, _):
    """A loss over the largest one of the call, which is another one on each layout."""
    loss = logits[..., 0] ** 2
    return loss / loss.max()


@pytest.mark.parametrize(
    ("loss", "settings", "said"),
    [
        (
            relative,
            (),
            r"a token loss=0\.\d+ among others, 1 alone; try a loss of its own",
        ),
        ("mse", (), "loss='mse' is not a loss; try a function"),
        (nameless, (), r"loss= gives \['cross_entropy'\] and no 'loss'"),
        (summed, (), r"loss= gives 'loss' of shape \(\) for targets \(2, 3\)"),
        (called_tokens, (), "loss= gives 'tokens', another figure of a step"),
        (
            cross_entropy,
            ("train.z_loss=0.1",),
            "train.z_loss=0.1 shapes the shipped loss, not loss=",
        ),
    ],
    ids=["depends on others", "a name", "no loss", "a sum", "name of a figure", "settings beside"],
)
def test_what_is_no_loss_costs_one_line(loss, settings, said):
    with pytest.raises(ConfigError, match=said):
        shard(tiny(*settings), devices=jax.devices()[:1], loss=loss)
