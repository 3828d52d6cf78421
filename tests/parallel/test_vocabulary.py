"""Rows that are looked up are those of the whole table, however table, ids and stream are split."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RulesConfig
from spmdtrain.parallel.axes import make_rules
from spmdtrain.parallel.mesh import AXES
from spmdtrain.parallel.regions import MANUAL_AXES, make_constrain
from spmdtrain.parallel.vocabulary import make_lookup

SIZES = {"pipeline": 2, "context": 2, "tensor": 2}
STREAM = ("batch", "stream_time", "embed")
# Axes of (rows of the table, their elements, the tokens, the stream's tokens, its elements). XLA
# has aborted where the elements are split, and neither rows nor tokens but those of the stream are.
SPLITS = [
    ((), ("context",), (), ("context",), ()),
    ((), ("context",), (), ("context",), ("tensor",)),
    ((), ("context",), (), (), ("tensor",)),
    ((), ("context",), ("context",), ("context",), ("tensor",)),
    ((), ("tensor",), (), ("context",), ()),
    (("tensor",), ("context",), (), ("context",), ()),
    (("tensor",), (), ("context",), ("context",), ("tensor",)),
    (("context", "tensor"), (), (), ("tensor",), ()),
]


@pytest.mark.parametrize("vocab, embed, time, stream_time, stream", SPLITS)
def test_a_lookup_and_its_gradient_are_those_of_the_whole_table(
    vocab, embed, time, stream_time, stream
):
    sizes = [SIZES.get(axis, 1) for axis in AXES]
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    overrides = RulesConfig(
        parameters={"vocab": vocab, "embed": embed},
        activations={"time": time, "stream_time": stream_time, "embed": stream},
    )
    rules = make_rules(overrides, mesh.shape)
    table, ids, slope = drawn()

    def region(table, ids, slope):
        lookup = make_lookup(rules, MANUAL_AXES)
        constrain = make_constrain(rules, MANUAL_AXES)
        rows, pull = jax.vjp(lambda table: constrain(lookup(table, ids), *STREAM), table)
        return rows, pull(slope)[0]

    with jax.set_mesh(mesh):
        placed = jax.device_put(table, NamedSharding(mesh, P(vocab or None, embed or None)))
        on_stages = jax.shard_map(
            region, axis_names=set(MANUAL_AXES), in_specs=P(), out_specs=P(), check_vma=False
        )
        rows, gradient = jax.jit(on_stages)(placed, ids, slope)
    want, pull = jax.vjp(lambda table: table[ids], table)
    assert np.array_equal(rows, want)
    assert np.allclose(gradient, pull(slope)[0], rtol=1e-6)


def drawn():
    keys = jax.random.split(jax.random.key(0), 3)
    table = jax.random.normal(keys[0], (16, 8))
    ids = jax.random.randint(keys[1], (4, 8), 0, 16)
    return table, ids, jax.random.normal(keys[2], (4, 8, 8))
