"""Attention over `context`: every method trains as one device does, or is refused in one line.

test_layouts.py trains 20 steps with the method that a run takes by itself.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import batches_of, gradients, initial_weights, mesh_of, prepared, tiny

from spmdtrain.config import ConfigError
from spmdtrain.inference.sample import Choice, make_generate, make_logits
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import Attention, Mlp
from spmdtrain.models.transformer import Transformer
from spmdtrain.parallel.context.context_method import ContextMethod, zigzag_order
from spmdtrain.train.compared.in_order import placed_arrays
from spmdtrain.train.external_arrays.check_arrays import check_batch
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_losses

pytestmark = pytest.mark.long

SMALL = (
    "model.name=llama",
    "model.embed=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.vocab=32",
    "train.sequence_length=16",
    "train.global_batch=16",
)
NOISY = ("model.dropout=0.1",)
PACKED = ("data.packing=documents",)
WINDOWS = ("model.windows=[3,0]", "model.sinks=true")
ULYSSES = ("model.context_attention=ulysses",)
TENSOR = ("mesh.context=2", "mesh.tensor=2", "mesh.data=2")
STAGES = ("mesh.pipeline=2", "mesh.context=2", "mesh.data=2", "train.microbatch=2")
STREAM = ("mesh.context=2", "mesh.tensor=2", "rules.activations.stream_time=context,tensor")

# (settings that change numbers, settings that must not)
LAYOUTS = [
    ((*WINDOWS, *PACKED), (*STAGES, "train.remat=full")),
    ((*WINDOWS, *PACKED, "model.kv_heads=4"), ("mesh.context=4", *ULYSSES)),
]
MORE_LAYOUTS = [
    (NOISY, ("mesh.context=2",)),
    ((), ("mesh.context=4", "mesh.fsdp=2")),
    (PACKED, (*TENSOR, "train.remat=full")),
    (NOISY, STAGES),
    (PACKED, STREAM),
    ((), ("mesh.context=2", "mesh.tensor=2", "train.remat=dots")),
    (NOISY, (*STAGES, *ULYSSES)),
]


def assert_as_on_one_device(numbers, placement):
    loss, found = gradients((*SMALL, *numbers), placement)
    wanted_loss, wanted = gradients((*SMALL, *numbers))
    assert abs(loss - wanted_loss) <= 1e-5 * wanted_loss
    for path, want in wanted.items():
        worst = np.max(np.abs(found[path] - want)) / np.max(np.abs(want))
        assert worst <= 1e-5, f"{path}: {worst}"


@pytest.mark.parametrize(("numbers", "placement"), LAYOUTS, ids=["ring", "ulysses"])
def test_every_gradient_is_that_of_one_device(numbers, placement):
    assert_as_on_one_device(numbers, placement)


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "placement"), MORE_LAYOUTS, ids=str)
def test_every_gradient_is_that_of_one_device_in_more_layouts(numbers, placement):
    assert_as_on_one_device(numbers, placement)


class Beside(Mlp):
    """An mlp that also sees the token before."""

    def __call__(self, x_bte, ctx):
        before_bte = jnp.pad(x_bte, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return super().__call__(x_bte + before_bte, ctx)


def test_a_model_that_keeps_the_order_of_its_tokens_gathers_and_says_so():
    make = partial(Transformer, mlp=Beside)

    def loss(*placement: str) -> float:
        setup = shard(tiny(*SMALL, *placement), make, jax.devices()[: mesh_of(placement)])
        losses = jax.jit(make_losses(setup))
        with batches_of(setup) as ahead:
            sums = losses(placed_arrays(setup, weights), next(ahead))
        return float(sums["loss"] / sums["tokens"])

    split = ("mesh.context=2",)
    setup = shard(tiny(*SMALL, *split), make, jax.devices()[:2])
    assert setup.context_method.line == (
        "attention: keys are gathered over context 2: Beside does not take tokens in any order"
    )
    weights = initial_weights(*SMALL)  # those of the shipped model: the parameters are the same
    assert loss(*split) == pytest.approx(loss(), rel=1e-5)


def test_a_model_goes_by_the_ring_if_all_its_parts_take_any_order():
    def method(*settings: str, make=None) -> ContextMethod:
        config = tiny(*SMALL, "mesh.context=2", *settings)
        return shard(config, make, jax.devices()[:2]).context_method

    assert method() == ContextMethod("ring", ("context",), 2)
    assert method("finetune.kind=lora", "finetune.rank=2").name == "ring"
    assert method("model.windows=[4]").name == "ring"
    assert method("model.context_attention=gather").line == (
        "attention: keys are gathered over context 2"
    )
    odd = method("train.sequence_length=6")
    assert odd.name == "gather" and "6 is not divisible by 2 x 2 devices" in odd.line
    both_sides = partial(Transformer, attention=partial(Attention, causal=False))
    assert method(make=both_sides).reason == "Attention does not take tokens in any order"
    assert prepared(*SMALL).context_method is None
    assert (prepared(*SMALL).context_line, prepared(*SMALL).zigzag) == ("", 1)


@pytest.mark.parametrize(
    ("settings", "make", "said"),
    [
        (
            ("model.context_attention=ring", "train.sequence_length=6"),
            None,
            "not divisible by 2 x 2",
        ),
        (("model.context_attention=ring",), partial(Transformer, mlp=Beside), "Beside does not"),
        (("model.context_attention=ulysses", "model.kv_heads=1"), None, "leaves 1 heads"),
    ],
)
def test_a_method_that_cannot_run_is_refused(settings, make, said):
    with pytest.raises(ConfigError, match=said) as raised:
        shard(tiny(*SMALL, "mesh.context=2", *settings), make, jax.devices()[:2])
    assert "--set model.context_attention=auto" in str(raised.value)


def test_tokens_on_devices_are_in_zigzag_order_with_their_positions():
    alone, split = prepared(*SMALL), prepared(*SMALL, "mesh.context=4")
    order = zigzag_order(16, 4)
    with batches_of(alone) as natural, batches_of(split) as zigzag:
        want, got = next(natural), next(zigzag)
    assert split.batch.keys() == got.keys() == want.keys() | {"positions"}
    assert (np.asarray(got["positions"]) == order).all()
    for name in ("tokens", "targets", "mask"):
        assert (np.asarray(got[name]) == np.asarray(want[name])[..., order]).all()
    assert got["tokens"].sharding.spec[2] == "context"
    check_batch(split, got, training=True)
    in_order = {**want, "positions": np.broadcast_to(np.arange(16), want["tokens"].shape)}
    with pytest.raises(ConfigError, match="needs zigzag order"):
        check_batch(split, {name: np.asarray(x) for name, x in in_order.items()}, training=True)


def test_packed_documents_in_zigzag_order_are_known_from_others():
    setup = prepared(*SMALL, *PACKED, "mesh.context=2")
    with batches_of(setup) as ahead:
        batch = {name: np.asarray(x) for name, x in next(ahead).items()}
    check_batch(setup, batch, training=True)
    back = np.argsort(zigzag_order(16, 2))
    natural = {name: x if x.ndim < 3 else x[..., back] for name, x in batch.items()}
    with pytest.raises(ConfigError, match="needs zigzag order"):
        check_batch(setup, natural, training=True)


def test_noise_follows_its_token():
    def drawn(method: ContextMethod | None):
        ctx = ForwardContext(
            jnp.zeros((2, 16), jnp.int32),
            dropout_rate=0.5,
            noise_b=jax.random.split(jax.random.key(0), 2),
            context_method=method,
        )
        return np.asarray(ctx.dropout(jnp.ones((2, 16, 3)), 0))

    ring = ContextMethod("ring", ("context",), 4)
    assert (drawn(ring) == drawn(None)[:, zigzag_order(16, 4)]).all()
    assert (drawn(ring) != drawn(None)).any()


def test_a_part_that_sees_the_token_before_makes_its_text_anew():
    """From a cache it would see the new token alone."""
    setup = shard(tiny(*SMALL), partial(Transformer, mlp=Beside), jax.devices()[:1])
    # Larger weights, so that the token before decides what follows.
    weights = {path: 10 * x for path, x in initial_weights(*SMALL).items()}
    params = placed_arrays(setup, weights)
    generate = make_generate(setup, 6, Choice(0))
    (ids,) = generate(params, [[5, 6, 7]], jax.random.key(0))
    logits = make_logits(setup)
    for at in range(3, 9):
        assert int(logits(params, ids[None, :at])[0, -1].argmax()) == ids[at], at
