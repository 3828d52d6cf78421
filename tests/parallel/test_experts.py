"""The rows of experts against their definition: all experts on all tokens, masked by the gates."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RulesConfig
from spmdtrain.models.layers.mlp_activations import gelu, swiglu
from spmdtrain.parallel.axes import AXES, BATCH_AXES, make_rules
from spmdtrain.parallel.experts import make_experts
from spmdtrain.parallel.experts.expert_weights import ExpertWeights
from spmdtrain.parallel.experts.sending import bucket_of, cut_round, sort_rows
from spmdtrain.parallel.reduce import psum_tree
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region

EXPERTS, CHOICES, WIDTH, FFN = 8, 3, 16, 24
BATCH, TOKENS = 2, 8
cut_once = jax.jit(cut_round, static_argnums=2)
sort_once = jax.jit(sort_rows, static_argnums=(1, 2))


def definition(activation, x_bte, gates_btk, ids_btk, weights: ExpertWeights) -> jax.Array:
    up = weights.up if weights.up.ndim == 4 else weights.up[:, :, None]
    h = jnp.einsum("bte,xeuf->btxuf", x_bte, up)
    if weights.up_bias is not None:
        h = h + weights.up_bias.reshape(h.shape[2:])
    own = [h[:, :, expert] for expert in range(EXPERTS)]
    own = [activation(each if weights.up.ndim == 4 else each[:, :, 0]) for each in own]
    y = jnp.einsum("xbtf,xfe->btxe", jnp.stack(own), weights.down)
    if weights.down_bias is not None:
        y = y + weights.down_bias
    gates_btx = (jax.nn.one_hot(ids_btk, EXPERTS) * gates_btk[..., None]).sum(-2)
    return jnp.einsum("btxe,btx->bte", y, gates_btx)


@cache
def drawn(gated: bool, biases: bool):
    """(x, gates, ids, weights); a choice of the last token is not made."""
    random = np.random.default_rng(0)
    u = (2, FFN) if gated else (FFN,)

    def draw(*shape):
        return random.standard_normal(shape).astype(np.float32)

    ids = np.argsort(draw(BATCH, TOKENS, EXPERTS))[..., :CHOICES].astype(np.int32)
    ids[-1, -1, 1] = -1
    weights = ExpertWeights(
        draw(EXPERTS, WIDTH, *u) / 4,
        draw(EXPERTS, FFN, WIDTH) / 4,
        draw(EXPERTS, *u) if biases else None,
        draw(EXPERTS, WIDTH) if biases else None,
    )
    return draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, CHOICES), ids, weights


def gradients(function, ids, *given):
    """(gradients of x, gates and weights, y)"""

    def total(x, gates, weights):
        y = function(x, gates, ids, weights)
        return jnp.sin(y / 8).sum(), y

    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*given)


@pytest.mark.parametrize(
    ("gated", "biases", "factor"), [(True, True, 0.1), (False, False, 1.25)], ids=["many", "one"]
)
@pytest.mark.seconds
def test_experts_are_their_definition_in_any_number_of_rounds(gated, biases, factor):
    x, gates, ids, weights = drawn(gated, biases)
    activation = swiglu if gated else gelu
    ours = partial(make_experts(factor=factor), activation=activation)
    got = gradients(ours, ids, x, gates, weights)
    want = gradients(partial(definition, activation), ids, x, gates, weights)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(mine - theirs)) <= 2e-6 * np.max(np.abs(theirs))


def test_nothing_is_added_at_an_index():
    """The order of such sums is that in which threads come by."""
    x, gates, ids, weights = drawn(gated=True, biases=True)
    ours = partial(make_experts(factor=0.5), activation=swiglu)

    def total(x, gates, weights):
        return ours(x, gates, ids, weights).sum()

    traced = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(x, gates, weights))
    assert "gather" in traced and "scatter-add" not in traced


@pytest.mark.seconds
@pytest.mark.parametrize("factor", [0.05, 0.6, 8.0])
@pytest.mark.parametrize("routing", ["even", "one device", "nobody"])
def test_each_row_goes_once_and_each_message_once_in_a_round(routing, factor):
    devices, own, tokens = 4, 2, 20
    random = np.random.default_rng(1)
    ids = np.argsort(random.random((tokens, EXPERTS)))[:, :CHOICES].astype(np.int32)
    if routing == "one device":
        ids[:] = [0, 1, -1]
    if routing == "nobody":
        ids[:] = -1
    bucket = bucket_of(tokens, CHOICES, devices, own, factor)
    outbox = sort_once(jnp.asarray(ids), devices, own)
    begin, sent, rounds = outbox.begin_d, [], 0
    while np.any(begin < outbox.end_d):
        cut = cut_once(outbox, begin, bucket)
        assert np.all(cut.end_d[begin < outbox.end_d] > begin[begin < outbox.end_d])
        begin, rounds = cut.end_d, rounds + 1
        _check_round(jax.device_get(cut), ids, own, bucket)
        sent += list(cut.row_dc[cut.row_dc < ids.size])
    assert sorted(map(int, sent)) == sorted(np.flatnonzero(ids.reshape(-1) >= 0))
    assert rounds <= 1 or not bucket.holds_all(tokens, CHOICES, own)
    assert routing != "one device" or rounds >= tokens / bucket.messages


def _check_round(cut, ids, own, bucket):
    """Every row finds its message, and every choice its row."""
    places = {}
    for device, (tokens, rows, messages) in enumerate(
        zip(cut.token_dm, cut.row_dc, cut.message_dc, strict=True)
    ):
        used = tokens[tokens < len(ids)]
        assert len(set(used)) == len(used)
        assert np.all(tokens[len(used) :] > len(ids))
        for place, (row, message) in enumerate(zip(rows, messages, strict=True)):
            if row >= ids.size:
                assert message == bucket.messages
                continue
            assert ids.reshape(-1)[row] // own == device
            assert tokens[message] == row // CHOICES
            places[int(row)] = device * bucket.rows + place
    for row, (place, message) in enumerate(
        zip(cut.place_nk.reshape(-1), cut.message_nk.reshape(-1), strict=True)
    ):
        assert places.get(row, place) == place
        assert (row in places) == (place < cut.row_dc.size)
        if message < cut.token_dm.size:
            assert cut.token_dm.reshape(-1)[message] == row // CHOICES
    # The choices of a token name each of its messages once.
    named = sorted(cut.message_nk[cut.message_nk < cut.token_dm.size])
    assert named == list(np.flatnonzero(cut.token_dm.reshape(-1) < len(ids)))


# A layer on eight devices: what the rules split, the factor, and the dtype.
LAYERS = {
    "experts, ffn": ({"expert": 4, "tensor": 2}, {}, 0.2, "float32"),
    "experts over tensor": (
        {"expert": 2, "context": 2, "tensor": 2},
        {"experts": ("expert", "tensor")},
        1.25,
        "float32",
    ),
    "half precision": (
        {"fsdp": 2, "expert": 2, "tensor": 2},
        {"stream_time": ("context", "tensor")},
        8.0,
        "bfloat16",
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.seconds
def test_experts_on_a_mesh_are_those_of_one_device_however_tokens_choose(layer):
    *_, dtype = LAYERS[layer]
    near = 3e-6 if dtype == "float32" else 3e-2
    on_mesh = layer_on_mesh(*LAYERS[layer])
    of_one = partial(definition, swiglu)
    x, gates, even, weights = drawn(gated=True, biases=True)
    x, gates, even = (np.concatenate([each] * 4) for each in (x, gates, even))
    for ids in (even, np.broadcast_to(np.arange(CHOICES, dtype=np.int32), even.shape)):
        got = on_mesh(ids, x, gates, weights)
        want = gradients(of_one, ids, x, gates, weights)
        for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.max(np.abs(mine - theirs)) <= near * np.max(np.abs(theirs))


def layer_on_mesh(sizes, overrides, factor, dtype):
    """What `gradients` gives, with every sum over devices as a step makes it; compiled once."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    time = {name: axes for name, axes in overrides.items() if name == "stream_time"}
    own = {name: axes for name, axes in overrides.items() if name not in time}
    rules = make_rules(RulesConfig(parameters=own, activations=time), mesh.shape)
    experts = make_experts(rules, MANUAL_AXES, factor)

    def local(ids, x, gates, weights):
        def total(x, gates, weights):
            weights = jax.tree.map(lambda weight: weight.astype(dtype), weights)
            y = experts(x.astype(dtype), gates, ids, weights, activation=swiglu)
            return jnp.sin(y.astype(jnp.float32) / 8).sum(), y

        (dx, dgates, dweights), y = jax.grad(total, (0, 1, 2), has_aux=True)(x, gates, weights)
        shared = [axis for axis in ("data", "fsdp") if mesh.shape[axis] > 1]
        return (dx, dgates, psum_tree(dweights, shared)), y

    batch = P(BATCH_AXES)
    owned = ExpertWeights(*[P("expert")] * 4)
    region = manual_region(
        local, mesh, MANUAL_AXES, (batch, batch, batch, owned), ((batch, batch, owned), batch)
    )
    compiled = jax.jit(region)

    def run(*given):
        with jax.default_matmul_precision("highest"):
            return jax.device_get(compiled(*given))

    return run
