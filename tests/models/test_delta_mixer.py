"""The layer of the gated delta rule is its definition, in numpy's float64, also with a cache and
with several documents in a row.
"""

from functools import cache
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import prepared, tiny
from mixer_oracle import Drawn, convolution, error, recurrence

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mixers.gated_delta import DeltaMixer
from spmdtrain.models.layers.recurrent_cache import empty_delta_cache
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.parallel.regions import make_constrain, make_local_map

T, B = 21, 2
KINDS = {
    "head": ("rate=1", "epsilon=1e-3"),
    "channel": (
        "decay=channel",
        "decay_rank=3",
        "gate=sigmoid",
        "gate_rank=5",
        "value_heads=2",
        "taps=1",
        "rate=2",
    ),
}


@cache
def built(kind: str):
    """(settings, the layer with weights that leave slow and fast heads)."""
    settings = ("key_heads=2", "value_heads=6", "key_dim=5", "value_dim=6", *KINDS[kind])
    config = tiny("model.embed=16", *(f"model.delta.{text}" for text in settings)).model
    with nnx.use_eager_sharding(False):
        mixer = DeltaMixer(config, nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 20))
    for _, value in nnx.to_flat_state(nnx.state(mixer)):
        value[...] = 0.4 * jax.random.normal(next(keys), value.shape) + value[...]
    slow = jnp.linspace(jnp.log(0.02), jnp.log(4.0), mixer.decay_log.shape[0])
    mixer.decay_log[...] = slow
    return config, mixer


def by_definition(kind: str, x_bte, starts_bt):
    """The output [b, t, e] of the layer."""
    config, mixer = built(kind)
    delta = config.delta

    def weight(name):
        return np.float64(attrgetter(name)(mixer)[...])

    def project(name):
        return np.einsum("bte,ehn->bthn", x, weight(name))

    def narrow(name):
        low = np.einsum("bte,el->btl", x, weight(f"{name}.down_el"))
        return np.einsum("btl,lhn->bthn", low, weight(f"{name}.up_lhn"))

    def sigmoid(y):
        return 1 / (1 + np.exp(-y))

    def unit(y):
        return y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)

    x = np.float64(x_bte)
    heads = (*x.shape[:2], delta.key_heads, delta.group)
    width = 2 * delta.key_dim + delta.group * delta.value_dim
    fused = project("qkvz_ehn")
    y = convolution(fused[..., :width], weight("taps_hnw"), starts_bt)
    q, k, v = np.split(y * sigmoid(y), [delta.key_dim, 2 * delta.key_dim], -1)
    numbers = project("rates_ehn")
    rate, decay = numbers[..., : delta.group], numbers[..., delta.group :]
    gate = fused[..., width:]
    if kind == "channel":
        decay = narrow("narrow_decay")
        gate = narrow("narrow_gate")
    decay = decay.reshape(*heads, -1)
    softplus = np.log1p(np.exp(decay + weight("decay_bias").reshape(decay.shape[2:])))
    log_decay = -np.exp(weight("decay_log")).reshape(*heads[2:], 1) * softplus
    tokens = Drawn(
        unit(q) * delta.key_dim**-0.5,
        unit(k),
        v.reshape(*heads, -1),
        log_decay,
        delta.rate * sigmoid(rate),
        starts_bt,
    )
    o, _ = recurrence(tokens)
    epsilon = delta.epsilon or config.norm_epsilon
    normed = o / np.sqrt((o * o).mean(-1, keepdims=True) + epsilon) * weight("norm_scale_v")
    gate = gate.reshape(o.shape)
    gated = normed * (gate if delta.gate == "silu" else 1) * sigmoid(gate)
    return np.einsum("bthrv,hrve->bte", gated, weight("out_hrve"))


@cache
def jitted(kind: str):
    graphdef, state = nnx.split(built(kind)[1])

    def run(state, x_bte, segments_bt, cache):
        positions = jnp.zeros(x_bte.shape[:2], jnp.int32)
        mixer = nnx.merge(graphdef, state)
        return mixer(x_bte, ForwardContext(positions, segments_bt), cache)

    return jax.jit(run), state


def outputs(kind, x_bte, segments_bt=None, cache=None):
    run, state = jitted(kind)
    y, grown = run(state, x_bte, segments_bt, cache)
    return y if cache is None else (y, grown)


def drawn(tokens=T):
    return np.random.default_rng(0).normal(size=(B, tokens, 16)).astype(np.float32)


SEGMENTS = np.array([[3] * 5 + [4] * 1 + [7] * 15, [1] * 12 + [2] * 9])


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_its_definition(kind):
    starts = np.pad(SEGMENTS[:, 1:] != SEGMENTS[:, :-1], ((0, 0), (1, 0)))
    found = outputs(kind, drawn(), SEGMENTS)
    assert error(found, by_definition(kind, drawn(), starts)) < 3e-6


def test_a_document_does_not_depend_on_the_one_before():
    changed = drawn()
    changed[0, 4] += 1
    before, after = (np.asarray(outputs("head", x, SEGMENTS)) for x in (drawn(), changed))
    assert np.array_equal(before[0, 5:], after[0, 5:])
    assert np.any(before[0, 4] != after[0, 4])
    assert np.array_equal(before[1], after[1])


def empty(kind):
    config = built(kind)[0]
    stacked = empty_delta_cache(config, 1, (B, T), "float32", lambda x, *_: x)
    return jax.tree.map(lambda x: x[0], stacked)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "first"), [("head", 2), ("head", 1), ("head", 8), ("channel", 20)]
)
def test_with_a_cache_tokens_get_the_outputs_of_a_pass_over_all(kind, first):
    y, cache = outputs(kind, drawn()[:, :first], None, empty(kind))
    parts = [y]
    for at in range(first, T):
        y, cache = outputs(kind, drawn()[:, at : at + 1], None, cache)
        parts.append(y)
    assert error(jnp.concatenate(parts, 1), outputs(kind, drawn())) < 2e-6


# Starts within the first piece, in both of two neighbours, and at the edge of a piece.
PACKED = np.array([[1] * 2 + [2] * 9 + [3] * 1 + [4] * 12, [1] * 12 + [2] * 12])
ORDERS = [
    ("head", "ring", 2, PACKED),
    ("channel", "ring", 4, PACKED),
    ("head", "ring", 4, None),
    ("head", "gather", 4, PACKED),
    ("channel", "gather", 2, None),
    ("head", "ulysses", 2, PACKED),
    ("channel", "ulysses", 2, None),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "method", "ways", "segments"), ORDERS)
def test_over_devices_of_a_sequence_it_is_as_on_one(kind, method, ways, segments):
    settings = (f"mesh.context={ways}", f"model.context_attention={method}")
    setup = prepared(*settings, "train.sequence_length=24")
    graphdef, state = nnx.split(built(kind)[1])
    x_bte, positions = drawn(24), np.zeros((B, 24), np.int32)
    weight = np.random.default_rng(3).normal(size=x_bte.shape)
    order = zigzag_order(24, setup.context_method.zigzag)

    def with_gradients(ctx, state, x_bte, weight):
        def loss(state, x_bte):
            y = nnx.merge(graphdef, state)(x_bte, ctx)[0]
            return (y * weight).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x_bte)

    one = ForwardContext(positions, segments)
    (_, y), gradients = jax.jit(with_gradients)(one, state, x_bte, weight)
    cut = segments if segments is None else segments[:, order]
    split = ForwardContext(
        positions,
        cut,
        constrain=make_constrain(setup.rules),
        local_map=make_local_map(setup.rules),
        context_method=setup.context_method,
    )
    with jax.set_mesh(setup.mesh):
        arrays = (split, state, x_bte[:, order], weight[:, order])
        (_, found), of_found = jax.device_get(jax.jit(with_gradients)(*arrays))
    back = np.argsort(order)
    assert error(found[:, back], y) < 1e-6
    assert error(of_found[1][:, back], gradients[1]) < 1e-5
    of_weights = zip(*(nnx.to_flat_state(g[0]) for g in (of_found, gradients)), strict=True)
    for (path, x), (_, expected) in of_weights:
        assert error(x[...], expected[...]) < 1e-5, path
