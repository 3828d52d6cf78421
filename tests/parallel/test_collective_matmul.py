"""A collective matmul is the matmul of the gathered tokens, or the scattered sum, to the gradients.

Letters as in collective_matmul.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled_step, prepared
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.compiled import hlo
from spmdtrain.config import ConfigError
from spmdtrain.parallel.matmuls.collective_matmul import Ring
from spmdtrain.parallel.tensor_matmul import make_find_ring
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.traffic import needed_traffic

RINGS = {  # devices of context -> ring
    1: Ring(axis="tensor", stream=P(None, "tensor", None), wide=P(None, None, "tensor", None)),
    2: Ring(
        axis="tensor",
        stream=P(None, ("context", "tensor"), None),
        wide=P(None, "context", "tensor", None),
    ),
}
SEQUENCE_PARALLEL = ("mesh.tensor=4", "rules.activations.stream_time=context,tensor")
COLLECTIVE = (*SEQUENCE_PARALLEL, "mesh.collective_matmul=true")


@pytest.mark.seconds
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("tensor", [2, 3, 4])
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_values_and_gradients_are_those_of_the_plain_matmul(way, tensor, context):
    mesh = jax.make_mesh((context, tensor), ("context", "tensor"))
    ring = RINGS[context]
    keys = jax.random.split(jax.random.key(tensor), 3)
    stream = (3, 2 * context * tensor, 5)  # [b, t, e]
    wide = (*stream[:2], 2 * tensor, 3)  # [b, t, *f]
    if way == "gather":
        multiply, equation = ring.gather_matmul, "bte,efg->btfg"
        shapes = (stream, (5, *wide[2:]), wide)
        specs = (ring.stream, ring.column, ring.wide)
    else:
        multiply, equation = ring.matmul_scatter, "btfg,fge->bte"
        shapes = (wide, (*wide[2:], 5), stream)
        specs = (ring.wide, ring.row, ring.stream)
    x, weight, dy = map(jax.random.normal, keys, shapes)

    def with_gradients(multiply, *arrays):
        y, pull = jax.vjp(multiply, *arrays[:2])
        return y, *pull(arrays[2])

    want = with_gradients(partial(jnp.einsum, equation), x, weight, dy)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(each, NamedSharding(mesh, spec))
            for each, spec in zip((x, ring.copy(weight), dy), specs, strict=True)
        ]
        y, dx, dweights = jax.jit(partial(with_gradients, multiply))(*placed)
    assert len(dweights) == context  # of each part of the tokens
    for ours, theirs in zip((y, dx, dweights.sum(0)), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def _tensor_traffic(*settings: str) -> dict[str, float]:
    """Kind of collective -> bytes that a device sends for it over `tensor` alone, in one step."""
    setup = prepared(*settings)
    text = compiled_step(*settings).as_text()
    found: dict[str, float] = {}
    for each in hlo.traffic(text, setup.mesh.shape):
        if each["axis"] == "tensor":
            found[each["kind"]] = found.get(each["kind"], 0) + each["sent"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_layers_send_pieces_alone_and_just_what_theory_needs(remat):
    settings = (*COLLECTIVE, f"train.remat={remat}", "model.layers=6")
    setup = prepared(*settings)
    workload = workload_of(setup.config, setup.mesh.shape)
    sent = _tensor_traffic(*settings)
    sums = sent.pop("all-reduce")  # of norms' gradients and losses
    assert sent.keys() == {"all-gather", "reduce-scatter", "collective-permute"}
    assert sum(sent.values()) == needed_traffic(workload)["tensor"]
    # Of the embedding and the head.
    assert sent["all-gather"] == sent["reduce-scatter"] == 2 * 3 / 4 * workload.activation_bytes
    assert sums < workload.activation_bytes


def test_a_stream_that_tensor_does_not_split_is_refused():
    with pytest.raises(ConfigError, match=r"collective_matmul.*try --set rules.activations.stream"):
        prepared("mesh.tensor=4", "mesh.collective_matmul=true")
    prepared("mesh.data=4", "mesh.collective_matmul=true")  # nothing to split: nothing to say


def test_a_ring_is_found_where_tensor_splits_tokens_and_columns():
    rules = prepared(*COLLECTIVE, "mesh.context=2").rules
    find_ring = make_find_ring(rules)
    ring = find_ring((8, 16, 32), (8, 16, 64), ("ffn",))
    assert ring is not None
    assert ring.token_axes == ("context",)
    assert find_ring((8, 16, 32), (8, 16, 64), (None,)) is None  # whole columns
    whole = make_find_ring(prepared("mesh.tensor=4").rules)
    assert whole((8, 16, 32), (8, 16, 64), ("ffn",)) is None  # whole tokens
