"""An axis that owns its part of a weight: experts rest, work and are updated where they are.

The part below is a mean over all experts, of which a device holds its own. The tokens travel to
them over `expert`, and the weights do not.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import batches_of, mesh_of, tiny

import spmdtrain as st
from spmdtrain.models.layers import weight
from spmdtrain.parallel.reduce import Reduction
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.step import make_gradients

EXPERTS = 4
SMALLEST = (
    "model.embed=16",
    "model.heads=2",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=8",
)
UP = "blocks.layer.mlp.up_kef"


class Experts(nnx.Module):
    """The mean of what each expert makes of each token."""

    def __init__(self, config, rngs: nnx.Rngs):
        up, down = (config.embed, config.hidden), (config.hidden, config.embed)
        self.up_kef = weight(rngs, (EXPERTS, *up), ("experts", "embed", "ffn"))
        self.down_kfe = weight(rngs, (EXPERTS, *down), ("experts", "ffn", "embed"))

    def __call__(self, x_bte: jax.Array, ctx) -> jax.Array:
        up_kef, down_kfe = self.up_kef[...], self.down_kfe[...]
        is_part = len(up_kef) < EXPERTS
        if is_part:
            x_bte = jax.lax.all_gather(x_bte, "expert", axis=0, tiled=True)
        h = jax.nn.gelu(jnp.einsum("bte,kef->kbtf", x_bte, up_kef))
        y_bte = jnp.einsum("kbtf,kfe->bte", h, down_kfe) / EXPERTS
        if is_part:
            y_bte = jax.lax.psum_scatter(y_bte, "expert", scatter_dimension=0, tiled=True)
        return ctx.constrain(y_bte, "batch", "stream_time", "embed")


make = partial(st.Transformer, mlp=Experts)


def setup_of(*settings: str):
    return st.shard(tiny(*SMALLEST, *settings), make, jax.devices()[: mesh_of(settings)])


@cache
def first_batch(*settings: str) -> tuple[float, dict[str, np.ndarray]]:
    """(mean loss, gradients of the initial weights)"""
    setup = setup_of(*settings)
    state = st.init_state(setup)
    with batches_of(setup) as ahead:
        find = jax.jit(make_gradients(setup))
        found, sums = jax.device_get(find(state.params, state.step, next(ahead)))
    return float(sums["loss"] / sums["tokens"]), plain_arrays(setup, found)


LAYOUTS = {
    "expert": ("mesh.expert=4",),
    "data, fsdp": (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.expert=2",
        "train.zero=1",
        "rules.parameters.embed=fsdp,expert",
    ),
    "pipeline": ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.expert=2", "train.microbatch=1"),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_owned_weights_have_the_gradients_of_one_device(layout):
    loss, found = first_batch(*LAYOUTS[layout])
    wanted_loss, wanted = first_batch()
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for path in wanted:
        off = np.max(np.abs(found[path] - wanted[path])) / np.max(np.abs(wanted[path]))
        assert off <= 1e-5, f"{path}: {off}"


def test_what_is_gathered_and_summed_is_decided_once_by_the_logical_axes():
    setup = setup_of("mesh.data=2", "mesh.fsdp=2", "mesh.expert=2")
    assert setup.specs[UP] == jax.P(None, "expert", "fsdp", None)
    assert setup.gathered[UP] == ("fsdp",)
    assert setup.reductions[UP] == Reduction(sum=("data",))
    norm = setup.reductions["norm.scale_e"]
    assert norm == Reduction(sum=("data", "fsdp", "expert"))


def test_an_axis_is_left_to_the_dim_that_owns_it():
    setup = setup_of("mesh.fsdp=2", "mesh.expert=2", "rules.parameters.embed=fsdp,expert")
    qkv = "blocks.layer.attention.qkv_eknd"
    assert setup.specs[qkv][1] == setup.gathered[qkv] == ("fsdp", "expert")
    assert setup.specs[UP] == jax.P(None, "expert", "fsdp", None)
