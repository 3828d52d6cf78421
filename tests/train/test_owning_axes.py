"""An axis that owns its part of a weight: experts rest, work and are updated where they are.

The tokens travel to them, and the weights do not. Gradients are compared one by one: a reduction
over an axis too many, or too few, shows in no loss.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import batches_of, mesh_of, tiny

import spmdtrain as st
from spmdtrain.inference.sample import make_logits
from spmdtrain.models.layers import weight
from spmdtrain.models.layers.mlp_activations import swiglu
from spmdtrain.models.layers.weights import matmul_weight
from spmdtrain.parallel import experts
from spmdtrain.parallel.experts import make_experts
from spmdtrain.parallel.experts.expert_weights import ExpertWeights
from spmdtrain.parallel.reduce import Reduction
from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.step import make_gradients

EXPERTS, CHOICES = 24, 2  # 24 divide over 2, 3, 4 and 8 devices
SMALLEST = (
    "model.embed=16",
    "model.heads=2",
    "model.ffn=16",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=24",
)
UP = "blocks.layer.mlp.up_xeuf"
ROUTER = "blocks.layer.mlp.router_ex"
MARGIN = 1e-5  # of logits: with less, the order of a sum could decide which expert is chosen


class Mixture(nnx.Module):
    """The experts that a router chooses for each token, with biases.

    A side loss without a gradient counts the choices that are too close to call.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        e, f = config.embed, config.ffn
        self.router_ex = weight(rngs, (e, EXPERTS), ("embed", None), 1.0)
        self.up_xeuf = matmul_weight(
            rngs, (EXPERTS, e, 2, f), ("experts", "embed", None, "ffn"), 0.2
        )
        self.down_xfe = matmul_weight(rngs, (EXPERTS, f, e), ("experts", "ffn", "embed"), 0.2)
        self.up_bias = weight(rngs, (EXPERTS, 2, f), ("experts", None, "ffn"), 0.1)
        self.down_bias = weight(rngs, (EXPERTS, e), ("experts", "norm"), 0.1)

    def __call__(self, x_bte: jax.Array, ctx):
        logits_btx = jnp.einsum(
            "bte,ex->btx", x_bte, self.router_ex[...], precision=jax.lax.Precision.HIGHEST
        )
        best, ids_btk = jax.lax.top_k(logits_btx, CHOICES + 1)
        is_close_bt = jax.lax.stop_gradient(best[..., -2] - best[..., -1]) < MARGIN
        gates_btk = jnp.take_along_axis(jax.nn.softmax(logits_btx), ids_btk[..., :CHOICES], -1)
        weights = (self.up_xeuf, self.down_xfe, self.up_bias, self.down_bias)
        y_bte = ctx.experts(
            x_bte,
            gates_btk,
            ids_btk[..., :CHOICES],
            ExpertWeights(*(each[...] for each in weights)),
            activation=swiglu,
        )
        return y_bte, {"close": is_close_bt.sum().astype(jnp.float32)}


make = partial(st.Transformer, mlp=Mixture)


def setup_of(*settings: str):
    return st.shard(tiny(*SMALLEST, *settings), make, jax.devices()[: mesh_of(settings)])


@cache
def initial() -> dict[str, np.ndarray]:
    return jax.device_get(st.init_state(setup_of()).params)


def first_batch(*settings: str, factor: float = 1.25) -> tuple[float, dict[str, np.ndarray]]:
    """(mean loss, gradients of the initial weights)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "make_experts", partial(make_experts, factor=factor))
        setup = setup_of(*settings)
        find = jax.jit(make_gradients(setup))
        step = jax.device_put(np.int32(0), setup.state.step.sharding)
        with batches_of(setup) as ahead:
            params = placed_arrays(setup, initial())
            found, sums = jax.device_get(find(params, step, next(ahead)))
    assert sums["close"] == 0, "another seed: a choice is a matter of rounding"
    return float(sums["loss"] / sums["tokens"]), plain_arrays(setup, found)


@cache
def on_one_device() -> tuple[float, dict[str, np.ndarray]]:
    return first_batch()


def assert_gradients_of_one_device(settings: tuple[str, ...], factor: float) -> None:
    loss, found = first_batch(*settings, factor=factor)
    wanted_loss, wanted = on_one_device()
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for path in sorted(wanted, key=lambda path: path != ROUTER):
        off = np.max(np.abs(found[path] - wanted[path])) / np.max(np.abs(wanted[path]))
        assert off <= 1e-5, f"{path}: {off}"


PIPELINE = ("mesh.pipeline=2", "train.microbatch=2")
TO_TENSOR = "rules.parameters.experts=expert,tensor"
SPLIT_STREAM = "rules.activations.stream_time=context,tensor"
LAYOUTS = {
    "expert 4 fsdp 2, few rows a round": (
        ("mesh.expert=4", "mesh.fsdp=2", "rules.parameters.embed=fsdp,expert"),
        0.1,
    ),
    "expert 2 data 2 fsdp 2 zero": (
        ("mesh.expert=2", "mesh.data=2", "mesh.fsdp=2", "train.zero=1"),
        8.0,
    ),
    "expert 2 pipeline 2 context 2, zero bubble": (
        ("mesh.expert=2", "mesh.context=2", *PIPELINE, "pipeline.schedule=zero_bubble"),
        1.25,
    ),
}
# The others of the twelve, each with few and with all rows a round.
MORE = {
    "expert 8": ("mesh.expert=8",),
    "expert 3 data 2": ("mesh.expert=3", "mesh.data=2"),
    "expert 4 context 2": ("mesh.expert=4", "mesh.context=2"),
    "expert 4 tensor 2, remat": ("mesh.expert=4", "mesh.tensor=2", "train.remat=full"),
    "expert 2 fsdp 2 context 2": ("mesh.expert=2", "mesh.fsdp=2", "mesh.context=2"),
    "expert 2 tensor 2 context 2, split stream": (
        "mesh.expert=2",
        "mesh.tensor=2",
        "mesh.context=2",
        SPLIT_STREAM,
    ),
    "experts over tensor, fsdp 2": ("mesh.expert=2", "mesh.tensor=2", "mesh.fsdp=2", TO_TENSOR),
    "experts over tensor, split stream": (
        "mesh.expert=2",
        "mesh.tensor=2",
        "mesh.context=2",
        TO_TENSOR,
        SPLIT_STREAM,
    ),
    "expert 2 pipeline 2 data 2, 1f1b": ("mesh.expert=2", "mesh.data=2", *PIPELINE),
    "expert 2 pipeline 2 tensor 2, zero bubble": (
        "mesh.expert=2",
        "mesh.tensor=2",
        *PIPELINE,
        "pipeline.schedule=zero_bubble",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_have_the_gradients_of_one_device(layout):
    assert_gradients_of_one_device(*LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.1, 8.0])
@pytest.mark.parametrize("layout", [*MORE, *LAYOUTS])
def test_experts_have_the_gradients_of_one_device_on_every_mesh(layout, factor):
    settings = MORE[layout] if layout in MORE else LAYOUTS[layout][0]
    assert_gradients_of_one_device(settings, factor)


@pytest.mark.long
def test_a_model_of_experts_is_read_with_its_tokens_whole_on_every_device():
    tokens = np.arange(2 * 5).reshape(2, 5)  # which divide over no axis
    wanted, found = [], []
    for settings, logits in (((), wanted), (("mesh.expert=4", "mesh.tensor=2"), found)):
        setup = setup_of(*settings)
        logits += [make_logits(setup)(placed_arrays(setup, initial()), tokens)]
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-5)


def test_what_is_gathered_and_summed_is_decided_once_by_the_logical_axes():
    setup = setup_of("mesh.data=2", "mesh.fsdp=2", "mesh.expert=2")
    assert setup.specs[UP] == jax.P(None, "expert", "fsdp", None, None)
    assert setup.gathered[UP] == ("fsdp",)
    assert setup.reductions[UP] == Reduction(sum=("data",))
    norm = setup.reductions["norm.scale_e"]
    assert norm == Reduction(sum=("data", "fsdp", "expert"))


def test_an_axis_is_left_to_the_dim_that_owns_it():
    setup = setup_of("mesh.fsdp=2", "mesh.expert=2", "rules.parameters.embed=fsdp,expert")
    qkv = "blocks.layer.attention.qkv_eknd"
    assert setup.specs[qkv][1] == setup.gathered[qkv] == ("fsdp", "expert")
    assert setup.specs[UP] == jax.P(None, "expert", "fsdp", None, None)
    setup = setup_of("mesh.expert=2", "mesh.tensor=2", TO_TENSOR)
    assert setup.specs[UP] == jax.P(None, ("expert", "tensor"), None, None, None)
    assert setup.specs[qkv][2] == "tensor"


def test_copies_of_experts_wait_for_the_end_of_the_step_as_those_of_matmuls_do():
    setup = setup_of("mesh.data=2", "mesh.expert=2", "mesh.context=2")
    assert setup.copies[UP].axes == ("context",)
    assert setup_of("mesh.fsdp=2", "mesh.context=2").copies[UP].axes == ()
