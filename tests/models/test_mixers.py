"""The linear-time mixers are their definitions, in numpy's float64, also with a cache, with several
documents in a row, and where devices share a sequence.
"""

import re
from functools import cache
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import prepared, tiny
from interpreted import by_kernel
from mixer_oracle import conv_layer, delta_layer, error, ssd_layer

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mixers.gated_convolution import ConvMixer
from spmdtrain.models.layers.mixers.gated_delta import DeltaMixer
from spmdtrain.models.layers.mixers.state_space import SsdMixer
from spmdtrain.models.layers.recurrent_cache import (
    empty_conv_cache,
    empty_delta_cache,
    empty_ssd_cache,
)
from spmdtrain.models.projection import FullPrecision
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.parallel.regions import make_constrain, make_local_map

T, B = 21, 2
DELTA = ("delta.key_heads=2", "delta.value_heads=6", "delta.key_dim=5", "delta.value_dim=6")
SSD = ("ssd.head_dim=5", "ssd.state=7")
MAKERS = {
    "delta": (DeltaMixer, delta_layer, empty_delta_cache),
    "ssd": (SsdMixer, ssd_layer, empty_ssd_cache),
    "conv": (ConvMixer, conv_layer, empty_conv_cache),
}
KINDS = {
    "delta": (*DELTA, "delta.rate=1", "delta.epsilon=1e-3"),
    "delta by channel": (
        *DELTA,
        "delta.decay=channel",
        "delta.decay_rank=3",
        "delta.gate=sigmoid",
        "delta.gate_rank=5",
        "delta.value_heads=2",
        "delta.taps=1",
        "delta.rate=2",
    ),
    "ssd": (*SSD, "ssd.heads=6", "ssd.groups=2", "ssd.smallest_step=0.2", "ssd.largest_step=1.5"),
    "ssd of one group": (
        *SSD,
        "ssd.heads=4",
        "ssd.norm_first=true",
        "ssd.taps_bias=false",
        "ssd.factors=[0.5,2.0,0.7,1.5,0.3]",
        "ssd.in_factor=0.5",
        "ssd.out_factor=2.0",
    ),
    "ssd without norm": (*SSD, "ssd.heads=4", "ssd.norm=none"),
    "conv": ("conv.taps=3",),
    "conv with biases": ("conv.taps=4", "conv.bias=true"),
}


@cache
def built(kind: str):
    """(settings, the layer with weights that leave slow and fast heads)."""
    name = kind.split()[0]
    sizes = (f"model.{text}" for text in KINDS[kind])
    config = tiny("model.embed=16", f"model.mixers=['{name}']", *sizes).model
    with nnx.use_eager_sharding(False):
        mixer = MAKERS[name][0](config, nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 20))
    for _, value in nnx.to_flat_state(nnx.state(mixer)):
        value[...] = 0.4 * jax.random.normal(next(keys), value.shape) + value[...]
    if hasattr(mixer, "decay_log"):
        slow = jnp.linspace(jnp.log(0.02), jnp.log(4.0), mixer.decay_log.shape[0])
        mixer.decay_log[...] = slow
    return config, mixer


def by_definition(kind: str, x_bte, starts_bt):
    """The output [b, t, e] of the layer."""
    config, mixer = built(kind)

    def weight(name):
        return np.float64(attrgetter(name)(mixer)[...])

    return MAKERS[kind.split()[0]][1](config, weight, np.float64(x_bte), starts_bt)


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
    """Also of a small stream, of which the epsilons in norms decide the output."""
    starts = np.pad(SEGMENTS[:, 1:] != SEGMENTS[:, :-1], ((0, 0), (1, 0)))
    for x_bte in (drawn(), 1e-3 * drawn()):
        found = outputs(kind, x_bte, SEGMENTS)
        assert error(found, by_definition(kind, x_bte, starts)) < 3e-6


@pytest.mark.parametrize("kind", ["delta", "delta by channel"])
def test_of_a_small_stream_the_epsilon_of_keys_shows(kind):
    """It is added to the sum of squares: as the least size it would do the same to any other."""

    def at_least(y):
        return y / np.maximum(np.sqrt((y * y).sum(-1, keepdims=True)), 1e-6)

    config, mixer = built(kind)

    def weight(name):
        return np.float64(attrgetter(name)(mixer)[...])

    def mistaken(x_bte):
        starts = np.zeros(x_bte.shape[:2], bool)
        return delta_layer(config, weight, np.float64(x_bte), starts, unit=at_least)

    assert error(mistaken(drawn()), outputs(kind, drawn())) < 1e-4
    assert error(mistaken(1e-3 * drawn()), outputs(kind, 1e-3 * drawn())) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_decays_and_their_biases_stay_in_full_precision(kind):
    weights = dict(nnx.to_flat_state(nnx.state(built(kind)[1])))
    full = {path[-1] for path, weight in weights.items() if isinstance(weight, FullPrecision)}
    assert full == {"decay_log", "decay_bias", "time_bias", "skip"} & {path[-1] for path in weights}
    assert bool(full) == ("conv" not in kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_does_not_depend_on_the_one_before(kind):
    changed = drawn()
    changed[0, 4] += 1
    before, after = (np.asarray(outputs(kind, x, SEGMENTS)) for x in (drawn(), changed))
    assert np.array_equal(before[0, 5:], after[0, 5:])
    assert np.any(before[0, 4] != after[0, 4])
    assert np.array_equal(before[1], after[1])


def empty(kind):
    config = built(kind)[0]
    empty_cache = MAKERS[kind.split()[0]][2]
    stacked = empty_cache(config, 1, (B, T), "float32", lambda x, *_: x)
    return jax.tree.map(lambda x: x[0], stacked)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("delta", 2),
        ("delta", 1),
        ("delta", 8),
        ("delta by channel", 20),
        ("ssd", 1),
        ("ssd of one group", 9),
        ("conv", 1),
        ("conv with biases", 5),
    ],
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
    ("delta", "ring", 2, PACKED),
    ("delta by channel", "ring", 4, PACKED),
    ("delta", "ring", 4, None),
    ("delta", "gather", 4, PACKED),
    ("delta by channel", "gather", 2, None),
    ("delta", "ulysses", 2, PACKED),
    ("delta by channel", "ulysses", 2, None),
    ("ssd", "ring", 2, PACKED),
    ("ssd", "ulysses", 2, PACKED),
    ("ssd of one group", "ulysses", 4, PACKED),
    ("ssd of one group", "gather", 2, None),
    ("conv", "ring", 2, PACKED),
    ("conv with biases", "gather", 8, PACKED),
    ("conv", "ulysses", 2, None),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "method", "ways", "segments"), ORDERS)
def test_over_devices_of_a_sequence_it_is_as_on_one(kind, method, ways, segments):
    compare_with_one_device(kind, method, ways, segments)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["delta", "ssd"])
def test_over_devices_of_a_sequence_the_kernel_is_as_one_device(kind):
    """Both what the pieces do to a state and what their tokens read come from it."""
    with by_kernel() as decisions:
        compare_with_one_device(kind, "gather", 2, PACKED)
    scans = {call: name for call, name in decisions.taken.items() if call.startswith("chunk_scan")}
    assert set(scans.values()) == {"triton:interpret"}, decisions.missed
    columns = {call.split(":")[1].split()[0] for call in scans}
    assert columns == ({"6", "11"} if kind == "delta" else {"5"}), "values, and values with keys"


@pytest.mark.parametrize("kind", ["delta", "ssd", "conv"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_in_16_bits_what_devices_of_a_sequence_sum_is_summed_in_32(kind, method):
    """XLA's CPU compiler aborts the process at a 16-bit sum in a partly manual region."""
    setup, gradients, arrays = over_devices(kind, method, 2, PACKED)
    narrow = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, arrays[1:]
    )
    with jax.set_mesh(setup.mesh):
        program = jax.jit(gradients).lower(arrays[0], *narrow).as_text()
    heads = re.findall(r"(?:reduce_scatter|all_reduce)\"[^^]*\^bb0\(%\w+: tensor<(\w+)>", program)
    assert set(heads) == {"f32"}


def compare_with_one_device(kind, method, ways, segments):
    setup, gradients_of, arrays = over_devices(kind, method, ways, segments)
    _, state, x_bte, weight = arrays
    order = zigzag_order(24, setup.context_method.zigzag)
    back = np.argsort(order)
    one = ForwardContext(np.zeros((B, 24), np.int32), segments)
    (_, y), gradients = jax.jit(gradients_of)(one, state, x_bte[:, back], weight[:, back])
    with jax.set_mesh(setup.mesh):
        (_, found), of_found = jax.device_get(jax.jit(gradients_of)(*arrays))
    assert error(found[:, back], y) < 1e-6
    assert error(of_found[1][:, back], gradients[1]) < 1e-5
    of_weights = zip(*(nnx.to_flat_state(g[0]) for g in (of_found, gradients)), strict=True)
    for (path, x), (_, expected) in of_weights:
        assert error(x[...], expected[...]) < 1e-5, path


def over_devices(kind, method, ways, segments):
    """(setup, gradients by these arrays, the arrays where `ways` devices share a sequence)."""
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

    split = ForwardContext(
        positions,
        segments if segments is None else segments[:, order],
        constrain=make_constrain(setup.rules),
        local_map=make_local_map(setup.rules),
        context_method=setup.context_method,
    )
    return setup, with_gradients, (split, state, x_bte[:, order], weight[:, order])
