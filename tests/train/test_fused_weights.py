"""Muon updates a weight that holds several matrices matrix by matrix."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny, trained
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shares import rest
from test_optimizer import jordan, leaves_of

from spmdtrain.config import ConfigError
from spmdtrain.config.schema import AdamW, Muon
from spmdtrain.models.abstract import Parameter, build_model
from spmdtrain.models.layers import Fused, Mlp
from spmdtrain.models.transformer import Transformer
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.parameter_kinds import width_rate
from spmdtrain.train.updates.shipped_optimizers import shipped_update_rules

DELTA = (
    *("model.delta.key_heads=2", "model.delta.value_heads=4", "model.delta.key_dim=3"),
    "model.delta.value_dim=5",
)
SSD = ("model.ssd.heads=4", "model.ssd.head_dim=3", "model.ssd.state=5")
# The matrices of each weight of a mixer, by the slots of a head: [start, stop) of its last dim.
MODELS = {
    "delta": (
        DELTA,
        {"qkvz_ehn": [(0, 3), (3, 6), (6, 16), (16, 26)], "rates_ehn": [(0, 2), (2, 4)]},
    ),
    "decays of channels": (
        (*DELTA, "model.delta.decay=channel", "model.delta.gate_rank=4"),
        {"qkvz_ehn": [(0, 3), (3, 6), (6, 16)]},
    ),
    "state space": (
        (*SSD, "model.ssd.groups=2"),
        {"zxt_ehrn": [(0, 3), (3, 6), (6, 7)], "kq_ehn": [(0, 5), (5, 10)]},
    ),
    "state space of one group": (
        (*SSD, "model.ssd.groups=1"),
        {"zxt_ehrn": [(0, 3), (3, 6), (6, 7)], "kq_ehn": [(0, 5), (5, 10)]},
    ),
    # Its three lie along the dim before the last one.
    "convolution": (("model.conv.taps=3",), {"in_e3c": [(0, 1), (1, 2), (2, 3)]}),
}
MIXERS = {"delta": "delta", "decays of channels": "delta", "convolution": "conv"}


def model_of(name: str) -> dict[str, Parameter]:
    mixer = MIXERS.get(name, "ssd")
    settings = ("model.layers=2", f"model.mixers={mixer}", *MODELS[name][0])
    return dict(build_model(tiny(*settings, "model.embed=8", "model.heads=2")).parameters)


def updates_of(config, shapes, drawn: list[dict[str, np.ndarray]]):
    """The last of the updates by these gradients, and the state after it."""
    rules = shipped_update_rules(config, shapes)
    values = {path: jnp.zeros(drawn[0][path].shape) for path in shapes}
    state = optimizers.init(rules, shapes, values)
    take = jax.jit(lambda given, state: optimizers.updates(rules, shapes, given, state, values))
    found = {}
    for gradients in drawn:
        found, state = take(
            {path: jnp.asarray(g, jnp.float32) for path, g in gradients.items()}, state
        )
    return found, state


def gradients(shapes: dict[str, Parameter], steps: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{path: random.normal(size=p.shape) for path, p in shapes.items()} for _ in range(steps)]


@pytest.mark.seconds
@pytest.mark.parametrize("name", MODELS)
def test_each_matrix_of_a_mixer_is_orthogonalised_and_scaled_by_itself(name):
    """As its author writes Muon, in numpy, for the slots that each matrix has in every head."""
    parameters = model_of(name)
    matrices = {
        path: MODELS[name][1][path.rpartition(".")[2]]
        for path in parameters
        if path.rpartition(".")[2] in MODELS[name][1]
    }
    assert len(matrices) == len(MODELS[name][1])
    shapes = {path: parameters[path] for path in matrices}
    drawn = gradients(shapes, 3)
    got, _ = updates_of(Muon(), shapes, drawn)
    for path, slots in matrices.items():
        dim = -2 if path.endswith("e3c") else -1
        for layer in range(2):
            for start, stop in slots:
                own = [np.take(g[path][layer], range(start, stop), dim) for g in drawn]
                flat = [g.reshape(8, -1) for g in own]
                want = 0.2 * max(flat[0].shape) ** 0.5 * jordan(flat, Muon().momentum, True)[-1]
                found = np.take(np.asarray(got[path][layer]), range(start, stop), dim)
                np.testing.assert_allclose(
                    found.reshape(want.shape), want, atol=2e-4, err_msg=f"{path} {start}"
                )


@pytest.mark.parametrize("name", MODELS)
def test_taps_decays_and_skips_are_adams(name):
    """And the rate that muP gives a matrix does not depend on what it is held with."""
    mixer = {path: p for path, p in model_of(name).items() if ".attention." in path}
    names = (*MODELS[name][1], "rates_ehn", "out_", "down_", "up_")  # of matrices
    vectors = {
        path: p for path, p in mixer.items() if not path.rpartition(".")[2].startswith(names)
    }
    assert any(".taps" in path for path in vectors)
    drawn = gradients(vectors, 2)
    got, _ = updates_of(Muon(weight_decay=0.3), vectors, drawn)
    want, _ = updates_of(AdamW(weight_decay=0.3), vectors, drawn)
    for path in vectors:
        np.testing.assert_allclose(got[path], want[path], rtol=1e-6)
    fused = {path: p for path, p in mixer.items() if p.fused}
    assert {width_rate(Muon(), path, p, 4) for path, p in fused.items()} == {0.5}


SHAPE, SIZES = (2, 4, 3, 7), (2, 4, 1)
AXES = ("layer", "embed", "kv_heads", None)


@pytest.mark.seconds
@pytest.mark.parametrize("config", [Muon(), Muon(moment_dtype="8bit")], ids=repr)
def test_the_state_is_that_of_one_matrix(config):
    """Names, shapes and values: a checkpoint of a weight resumes, however it is cut."""
    whole, cut = {"w": Parameter(SHAPE, AXES)}, {"w": Parameter(SHAPE, AXES, fused=Fused(SIZES))}
    drawn = gradients(whole, 2)
    _, one = updates_of(config, whole, drawn)
    _, several = updates_of(config, cut, drawn)
    assert leaves_of(one) == leaves_of(several)
    jax.tree.map(np.testing.assert_array_equal, one, several)


def test_zeros_that_pad_a_weight_change_no_update():
    shapes = {"w": Parameter(SHAPE, AXES, fused=Fused(SIZES))}
    drawn = gradients(shapes, 2)
    padded = [{"w": np.pad(g["w"], ((0, 0), (0, 0), (0, 0), (0, 1)))} for g in drawn]
    want, _ = updates_of(Muon(), shapes, drawn)
    got, _ = updates_of(Muon(), shapes, padded)
    np.testing.assert_allclose(got["w"][..., :-1], want["w"], rtol=1e-5, atol=1e-6)
    assert not np.any(got["w"][..., -1])


def with_an_own_weight(fused):
    """The shipped transformer, whose mlps have one more weight, [embed, 24]."""

    class Wider(Mlp):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            x = jnp.zeros((config.embed, 24))
            self.own_ef = nnx.Param(x, out_sharding=("embed", None), fused=fused)

    return lambda config, rngs: Transformer(config, rngs, mlp=Wider)


@pytest.mark.parametrize(
    "fused", [Fused((8, 8)), Fused((24, 0)), Fused((24,), 1), Fused((12, 12), -3), (12, 12)]
)
def test_matrices_that_are_not_the_dim_of_their_weight_are_one_line(fused):
    said = re.escape(
        f"own_ef: fused={fused}, for a weight [64, 24] of one layer or expert; try Fused("
    )
    with pytest.raises(ConfigError, match=said):
        build_model(tiny("model.embed=64"), with_an_own_weight(fused))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_weight_of_ones_own_may_hold_several(stages):
    found = build_model(tiny(), with_an_own_weight(Fused((8, 16))), stages).parameters
    assert [p.fused for path, p in found.items() if path.endswith("own_ef")] == [Fused((8, 16))]


def test_an_update_is_the_same_however_a_mesh_splits_the_weight():
    """Its layers, its stream, its heads, and the dim along which its matrices lie."""
    shapes = {"w": Parameter((2, 4, 2, 8), AXES, fused=Fused((3, 4, 1)))}
    drawn = gradients(shapes, 1)
    want, _ = updates_of(Muon(), shapes, drawn)
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), (jax.sharding.AxisType.Auto,) * 3)
    for spec in (P("x", "y", "z"), P(None, "y", "z", "x"), P(None, None, None, ("y", "x"))):
        given = {"w": jax.device_put(jnp.float32(drawn[0]["w"]), NamedSharding(mesh, spec))}
        got, _ = updates_of(Muon(), shapes, [given])
        np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5, atol=1e-6)


@rest("the test above splits the update alone, in a hundredth of the time")
def test_a_run_on_a_mesh_is_that_of_one_device():
    """Key heads are split over `tensor`, layers over stages, and moments over `data`."""
    numbers = ("optimizer.name=muon", "model.mixers=['delta']", *DELTA)
    split = ("mesh.pipeline=2", "mesh.tensor=2", "mesh.data=2", "train.zero=1")
    want = trained(*numbers, steps=3)[0]
    got = trained(*numbers, *split, "train.microbatch=4", steps=3)[0]
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
