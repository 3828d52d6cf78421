"""What a recurrence costs beside projections: kernels of its chunks, and maps over `context`."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny

from spmdtrain.models.counted_flops import flops_of
from spmdtrain.models.layers.mixers.in_front import map_of
from spmdtrain.models.layers.mixers.recurrence import CHUNK, Tokens
from spmdtrain.models.mixer_sizes import mixer_sizes
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.layer_time import CHUNK_KERNELS, Work, add_work, layer_time
from spmdtrain.planner.cost.software import LAUNCH_SECONDS, software
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.traffic import needed_traffic

KEYS, VALUES, GROUP, HEADS = 8, 6, 2, 3
SIZES = (f"key_heads={HEADS}", f"value_heads={HEADS * GROUP}", f"key_dim={KEYS}")
DELTA = (
    *(f"model.delta.{size}" for size in (*SIZES, f"value_dim={VALUES}", "taps=3")),
    "model.mixers=['delta']",
    "model.vocab=64",
)
CHANNELS = (*DELTA, "model.delta.decay=channel")
SSD = (
    *(f"model.ssd.heads={HEADS * GROUP}", f"model.ssd.head_dim={VALUES}"),
    *(f"model.ssd.groups={HEADS}", f"model.ssd.state={KEYS}"),
    *("model.mixers=['ssd']", "model.vocab=64"),
)
MIXERS = {"delta": DELTA, "channels": CHANNELS, "ssd": SSD}
OF_SEQUENCE = ("mesh.context=4", "train.global_batch=4", "train.microbatch=2")
MAP = 4 * HEADS * GROUP * KEYS * (KEYS + VALUES)  # bytes


@pytest.mark.parametrize("name", MIXERS)
def test_a_map_has_the_flops_of_its_program(name):
    """But for the products of queries, which the compiler leaves out: no map reads them."""
    tokens = 2 * CHUNK
    decays = KEYS if name == "channels" else 1
    model = tiny(*MIXERS[name]).model
    sizes = mixer_sizes(model, model.layer_mixers[0])
    assert sizes is not None
    inputs = Tokens(
        q=jnp.ones((1, tokens, HEADS, KEYS)),
        k=jnp.ones((1, tokens, HEADS, KEYS)),
        v=jnp.ones((1, tokens, HEADS, GROUP, VALUES)),
        log_decay=jnp.ones((1, tokens, HEADS, GROUP, decays)),
        rate=jnp.ones((1, tokens, HEADS, GROUP)),
        starts=jnp.zeros((1, tokens), bool),
    )
    zero = jnp.zeros((1, HEADS, GROUP, KEYS, VALUES))
    program = jax.make_jaxpr(partial(map_of, corrects=name != "ssd"))(inputs, zero)
    of_queries = 2 * CHUNK * KEYS * (HEADS * GROUP if name == "channels" else HEADS)
    counted = flops_of(program.jaxpr) / tokens - of_queries
    assert sizes.map_flops(CHUNK) == pytest.approx(counted, rel=0.02)


def seconds(*settings: str, length: int = 4096) -> Work:
    """The recurrence of one layer, and what it waits for."""
    config = tiny(*settings, f"train.sequence_length={length}", f"model.max_length={length}")
    workload = workload_of(config, dict(config.mesh.sizes))
    layer = layer_time(workload, DEVICES["h100"], software("spmdtrain", "h100"))
    return add_work(layer["attention"], layer["launches"])


@pytest.mark.parametrize("name", ["delta", "ssd"])
def test_kernels_of_narrow_chunks_take_as_long_as_their_launch(name):
    """However many sequences run side by side; a second pass finds the maps of pieces."""
    forward, backward = (kernels * LAUNCH_SECONDS for kernels in CHUNK_KERNELS)
    chunks = 4096 / CHUNK
    one = seconds(*MIXERS[name], "train.microbatch=1")
    assert one == pytest.approx((chunks * forward, chunks * backward, 0.0))
    assert seconds(*MIXERS[name], "train.microbatch=2") == pytest.approx(one)
    again = seconds(*MIXERS[name], "train.microbatch=1", "train.remat=full")
    assert again.backward == pytest.approx(one.backward + one.forward, rel=0.01)
    of_gather = seconds(*MIXERS[name], *OF_SEQUENCE, "model.context_attention=gather")
    assert of_gather.forward == pytest.approx(2 * chunks / 4 * forward)
    of_ring = seconds(*MIXERS[name], *OF_SEQUENCE, "model.context_attention=ring")
    assert of_ring.forward == pytest.approx(2 * chunks / 8 * forward)


def test_wide_chunks_take_the_time_of_their_work():
    wide = ("key_heads=16", "value_heads=48", "key_dim=128", "value_dim=128", "taps=4")
    settings = [*(f"model.delta.{size}" for size in wide), "model.mixers=['delta']"]
    many = seconds(*settings, "model.vocab=64", "train.microbatch=32", "train.global_batch=32")
    few = seconds(*settings, "model.vocab=64", "train.microbatch=16", "train.global_batch=32")
    assert many.forward == pytest.approx(2 * few.forward, rel=0.01)


def sent(*settings: str) -> float:
    """The bytes over `context` in a step: maps or heads, and gradients of weights."""
    config = tiny(
        *DELTA, *OF_SEQUENCE, "train.sequence_length=64", "model.max_length=64", *settings
    )
    return needed_traffic(workload_of(config, dict(config.mesh.sizes)))["context"]


def test_maps_of_pieces_are_gathered_twice_and_their_gradients_scattered():
    times = 2 * tiny().model.layers * 3 / 4  # microbatches, layers, the share of other devices
    gather, ring = (f"model.context_attention={name}" for name in ("gather", "ring"))
    assert sent(ring) - sent(gather) == times * 3 * 2 * 4 * MAP
    assert sent(ring, "train.remat=full") - sent(ring) == times * 2 * 8 * MAP


def test_ulysses_exchanges_inputs_gates_and_outputs():
    heads = (*OF_SEQUENCE, "mesh.context=3", "train.sequence_length=192", "model.max_length=192")
    full, none = (
        sent(*heads, "model.context_attention=ulysses", f"train.remat={remat}")
        for remat in ("full", "none")
    )
    columns = HEADS * (2 * KEYS + GROUP * VALUES) + 2 * HEADS * GROUP * VALUES
    tokens = 2 * 192 / 3
    assert full - none == pytest.approx(2 * tiny().model.layers * 2 / 3 * 4 * tokens * columns)
