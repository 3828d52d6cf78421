"""The sentence that sells the framework: on every mesh it trains the same as on one device."""

import math

import jax
import numpy as np
import pytest
from helpers import compiled_step, partitioned_text, prepared, trained
from shares import core

from pallas_kernels.partition import axes_of
from spmdtrain.compiled import hlo
from spmdtrain.compiled.step_memory import memory_of
from spmdtrain.parallel.axes import BATCH_AXES
from spmdtrain.train.fresh import init_state
from spmdtrain.train.step import make_losses
from spmdtrain.train.updates.learning_rates import learning_rate

pytestmark = pytest.mark.long

STEPS, TOLERANCE = 20, 1e-5
NOISY = ("model.dropout=0.1",)
# Masks at document ends fall unevenly on shards and microbatches.
UNEVEN = ("data.packing=documents",)
LLAMA = (
    "model.name=llama",
    "model.layers=2",
    "model.embed=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.vocab=64",
)
CROSSWISE = (
    "rules.parameters.vocab=expert",
    "rules.parameters.embed=tensor,context",
    "rules.parameters.kv_heads=expert",
    "rules.parameters.ffn=expert",
    "rules.activations.time=tensor",
    "rules.activations.stream_time=context,tensor",
    "rules.activations.kv_heads=context",
    "rules.activations.ffn=",
    "rules.activations.vocab=context",
)
THIRDS = ("model.vocab=67", "train.global_batch=12", *UNEVEN)  # no mesh divides the vocabulary

SEQUENCE_PARALLEL = ("rules.activations.stream_time=context,tensor",)
COLLECTIVE_MATMUL = (*SEQUENCE_PARALLEL, "mesh.collective_matmul=true")
# Of two layers: the second chunk is padding.
INTERLEAVED = ("pipeline.schedule=interleaved", "pipeline.chunks=2")

# (settings that change numbers, settings that must not). Every axis and most of
# what is built on them at least once: these run on both Pythons.
CORE = [
    ((), ("mesh.data=8", "train.zero=1")),
    (NOISY, ("mesh.data=4", "mesh.tensor=2", "train.zero=1", "train.microbatch=1")),
    (UNEVEN, ("mesh.data=2", "mesh.expert=2", "mesh.tensor=2", "train.microbatch=2")),
    (LLAMA + UNEVEN, ("mesh.data=2", "mesh.fsdp=4", "train.microbatch=1", "train.zero=1")),
    (
        NOISY,
        ("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2", "train.microbatch=2", "train.zero=1"),
    ),
    (
        LLAMA + UNEVEN,
        (
            "mesh.pipeline=2",
            "mesh.fsdp=2",
            "mesh.context=2",
            "train.microbatch=2",
            "train.remat=full",
        ),
    ),
    (
        LLAMA,
        (
            "mesh.pipeline=2",
            "mesh.context=2",
            "mesh.tensor=2",
            "train.microbatch=4",
            "train.remat=full",
            *COLLECTIVE_MATMUL,
        ),
    ),
    (
        NOISY,
        (
            "mesh.pipeline=2",
            "mesh.context=4",
            "train.microbatch=4",
            "pipeline.schedule=zero_bubble",
        ),
    ),
    # XLA aborts where it has to partition lookups split like these, and their gradients.
    ((), ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2", *CROSSWISE)),
]
OTHERS = [
    ((), ("mesh.data=2",)),
    ((), ("mesh.tensor=4", "train.remat=dots")),
    ((), ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1")),
    (NOISY, ("train.microbatch=4",)),
    (NOISY, ("mesh.fsdp=4", "mesh.context=2", "train.remat=full")),
    (UNEVEN, ("mesh.data=4", "train.microbatch=1", "train.zero=1")),
    (UNEVEN, ("mesh.fsdp=8",)),
    (LLAMA, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1")),
    (UNEVEN, ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.data=2", "train.microbatch=1", *INTERLEAVED)),
    (NOISY, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", *SEQUENCE_PARALLEL)),
    ((), ("mesh.data=2", "mesh.context=2", "mesh.tensor=2", "rules.parameters.position=tensor")),
    (
        LLAMA,
        (
            "mesh.pipeline=2",
            "mesh.context=2",
            "mesh.tensor=2",
            "train.microbatch=4",
            *SEQUENCE_PARALLEL,
        ),
    ),
    (NOISY, ("mesh.fsdp=2", "mesh.tensor=4", "train.remat=dots", *COLLECTIVE_MATMUL)),
    (
        UNEVEN,
        ("mesh.data=2", "mesh.context=2", "train.zero=1", "train.microbatch=2", "train.remat=dots"),
    ),
    # Nothing but a dim that fsdp splits divides by `data`, or can be padded.
    (
        ("model.layers=3",),
        ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1", "train.microbatch=2"),
    ),
    (
        ("model.layers=6",),
        (
            "mesh.pipeline=2",
            "mesh.data=2",
            "mesh.fsdp=2",
            "train.zero=1",
            "train.microbatch=2",
            "rules.parameters.ffn=fsdp",
            "rules.parameters.embed=",
        ),
    ),
    (THIRDS, ("mesh.data=3", "train.zero=1", "train.microbatch=2")),
    (
        THIRDS,
        (
            "mesh.data=3",
            "mesh.fsdp=2",
            "train.zero=1",
            "rules.parameters.vocab=fsdp",
            "rules.parameters.embed=",
        ),
    ),
    (THIRDS, ("mesh.pipeline=3", "mesh.tensor=2", "train.microbatch=2")),
]


def name(layout) -> str:
    return " ".join(
        setting.split(".", 1)[1] for part in layout for setting in part if "=" in setting
    )


@pytest.mark.parametrize("layout", [*core(*CORE), *OTHERS], ids=name)
def test_it_trains_on_this_mesh_as_on_one_device(layout, record_property):
    numbers, placement = layout
    got, want = trained(*numbers, *placement, steps=STEPS)[0], trained(*numbers, steps=STEPS)[0]
    difference = np.max(np.abs(got - want) / want)
    record_property("largest relative loss difference", float(difference))
    assert difference <= TOLERANCE
    assert want[-1] < want[0] - 0.2, "the reference itself must learn"


@pytest.mark.parametrize(
    "layout",
    [
        (
            NOISY,
            ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1", "train.zero=1"),
        ),
        ((), ("mesh.data=2", "mesh.expert=2", "mesh.tensor=2", "rules.parameters.embed=expert")),
        (LLAMA + UNEVEN, ("mesh.data=2", "mesh.fsdp=2", "mesh.context=2", "train.remat=full")),
    ],
    ids=name,
)
def test_every_gradient_on_this_mesh_equals_one_devices(layout):
    """By the step that SGD takes from equal parameters; Adam would blow up rounding where a
    gradient is zero.
    """
    numbers, placement = layout
    sgd = (
        "optimizer.name=sgd",
        "optimizer.learning_rate=1",
        "optimizer.momentum=0",
        "train.clip=none",
    )
    got, want = (trained(*numbers, *rest, *sgd, steps=1)[1].params for rest in (placement, ()))
    start = prepared(*numbers, *sgd)
    start = init_state(start).params
    for path in want:
        theirs = np.asarray(want[path]) - np.asarray(start[path])
        ours = np.asarray(got[path]) - np.asarray(start[path])
        # a parameter of size 1 rounds its step at 1e-7; compare with the largest step of the tensor
        assert np.max(np.abs(ours - theirs)) <= 1e-5 * np.max(np.abs(theirs)) + 2e-7, path


def gradient_bytes(*overrides: str) -> tuple[int, int, int]:
    """(bytes over data inside loops, outside loops, bytes of all gradients in float32) per
    device.
    """
    setup = prepared(*overrides)
    text = compiled_step(*overrides).as_text()
    found = [c for c in hlo.instructions(text, setup.mesh.shape) if "data" in c.axis.split("+")]
    inside = sum(c.bytes for c in found if c.inside_loop)
    scattered = [c for c in found if c.kind == "reduce-scatter"]
    summed = [c for c in found if c.kind == "all-reduce" and not c.inside_loop]
    outside = sum(c.bytes for c in summed) + sum(
        c.bytes * setup.mesh.shape["data"] for c in scattered
    )
    return inside, outside, 4 * sum(p.size for p in setup.model.parameters.values())


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("train.zero=1",),
        ("train.microbatch=1",),
        *core(("train.zero=1", "train.microbatch=1")),
    ],
    ids=["plain", "zero", "accumulation 4", "zero accumulation 4"],
)
def test_gradients_cross_the_data_axis_once_per_step_and_never_in_a_loop(settings):
    inside, outside, gradients = gradient_bytes("mesh.data=4", *settings)
    assert inside == 0
    # one pass of the gradients; scalars come with it: loss, token count and, split by ZeRO-1, each
    # parameter's norm
    assert gradients <= outside <= gradients + 4 * (2 + len(prepared().model.parameters))


ACCUMULATED = ("precision.compute=bfloat16", "precision.accumulate=float32", "train.microbatch=1")


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.data=4",),
        ("mesh.fsdp=4",),
        ("mesh.expert=4",),
        ("mesh.pipeline=2", "mesh.data=2"),
        *core(("mesh.pipeline=2", "mesh.fsdp=2")),
    ],
    ids=" ".join,
)
def test_gradients_cross_the_axes_of_the_batch_as_precisely_as_they_accumulate(mesh):
    """In the partitioner's text: the CPU backend widens 16-bit sums after it, where no other test
    could see them.
    """
    text = partitioned_text(*mesh, *ACCUMULATED)
    sums = [
        each
        for each in hlo.instructions(text, prepared(*mesh, *ACCUMULATED).mesh.shape)
        if each.kind in ("all-reduce", "reduce-scatter")
        and set(each.axis.split("+")) & set(BATCH_AXES)
    ]
    narrow = [each for each in sums if {"bf16", "f16"} & each.bytes_by_dtype.keys()]
    assert sums and not narrow, f"{len(narrow)} of {len(sums)} sums are narrow"


def test_gradients_of_keys_and_values_are_scattered_over_context():
    """Each device needs those of its own tokens only; a sum of all would carry twice as much."""
    layout = ("mesh.context=4", "model.layers=1", "model.context_attention=gather")
    text = partitioned_text(*layout)
    setup = prepared(*layout)
    scattered = [
        each.bytes
        for each in hlo.instructions(text, setup.mesh.shape)
        if (each.kind, each.axis) == ("reduce-scatter", "context")
    ]
    sequences, tokens = setup.batch_shape.sequences, setup.config.train.sequence_length // 4
    keys = 4 * sequences * tokens * setup.config.model.embed  # as many heads as queries have
    assert scattered == [keys, keys]


@pytest.mark.parametrize(
    "layout",
    [
        ("mesh.context=4",),
        ("mesh.data=2", "mesh.context=2", "train.remat=dots", "train.zero=1"),
        *core(("mesh.pipeline=2", "mesh.context=2", "pipeline.schedule=zero_bubble")),
        ("mesh.context=2", "mesh.tensor=2", *COLLECTIVE_MATMUL),
    ],
    ids=" ".join,
)
def test_gradients_of_matmuls_cross_context_once_a_step(layout):
    layout = (*layout, "train.microbatch=4")
    setup = prepared(*layout)
    sizes = setup.mesh.shape
    sums = [
        each
        for each in hlo.instructions(partitioned_text(*layout), sizes)
        if each.kind == "all-reduce" and "context" in each.axis.split("+")
    ]
    table = 4 * setup.model.parameters["tokens.table_ve"].size  # the largest of what is no matmul
    assert max(each.bytes for each in sums if each.inside_loop) <= table

    def bytes_here(path: str) -> int:
        axes = axes_of(setup.specs[path])
        return 4 * setup.model.parameters[path].size // math.prod(sizes[axis] for axis in axes)

    of_matmuls = {path for path, each in setup.model.parameters.items() if each.is_of_matmuls}
    once = [each.bytes for each in sums if not each.inside_loop]
    assert len(of_matmuls) == 4
    for path in of_matmuls:
        assert bytes_here(path) in once, path


def test_remat_dots_keeps_the_products_of_copies():
    def matmuls(*settings: str) -> int:
        way = "model.context_attention=gather"  # with the dots of attention on one device
        return partitioned_text("model.layers=1", way, *settings).count(" dot(")

    kept = matmuls("mesh.context=2", "train.remat=dots")
    assert kept == matmuls("mesh.data=2", "train.remat=dots")
    assert kept + 4 <= matmuls("mesh.context=2", "train.remat=full")


def test_zero_halves_the_state_on_two_data_shards():
    """Parameters and both moments of Adam, each in float32."""
    whole = memory_of(compiled_step("mesh.data=2"))
    split = memory_of(compiled_step("mesh.data=2", "train.zero=1"))
    setup = prepared("mesh.data=2")
    state = 12 * sum(p.size for p in setup.model.parameters.values())
    saved = whole.argument_bytes - split.argument_bytes
    assert 0.45 * state <= saved <= 0.5 * state


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.data=4",),
        ("mesh.pipeline=2", "mesh.data=2"),
        *core(("mesh.pipeline=2", "mesh.data=2", "mesh.context=2")),
    ],
    ids=" ".join,
)
def test_zero_gathers_weights_once_a_step_in_compute_precision(mesh):
    layout = (*mesh, "train.zero=1", "train.microbatch=1", "precision.compute=bfloat16")
    text = partitioned_text(*layout)
    setup = prepared(*layout)
    found = hlo.instructions(text, setup.mesh.shape)
    gathered = [each for each in found if each.kind == "all-gather" and each.axis == "data"]
    assert not any(each.inside_loop for each in gathered)
    stages = setup.mesh.shape["pipeline"]
    assert sum(each.bytes for each in gathered) == 2 * sum(
        parameter.size // (stages if "pipeline" in axes_of(setup.specs[path]) else 1)
        for path, parameter in setup.model.parameters.items()
        if "data" in axes_of(setup.specs[path])
    )


def test_the_state_is_donated():
    memory = memory_of(compiled_step("mesh.data=2"))
    setup = prepared("mesh.data=2")
    state = 12 * sum(p.size for p in setup.model.parameters.values())
    assert memory.alias_bytes >= state


def test_fsdp_parameters_rest_split_and_are_born_split():
    _, state, _ = trained("mesh.fsdp=8", "data.packing=documents", steps=STEPS)
    weight = state.params["blocks.layer.mlp.up_ef"]
    assert weight.addressable_shards[0].data.size * 8 == weight.size


def test_each_step_has_its_own_learning_rate():
    _, state, metrics = trained(steps=STEPS)
    config = prepared().config
    rates = [learning_rate(config.optimizer, config.train.steps, step) for step in range(STEPS)]
    assert [float(out["learning_rate"]) for out in metrics] == [float(rate) for rate in rates]
    assert int(state.step) == STEPS


STATES = (
    "model.mixers=['delta', 'ssd', 'conv', 'attention']",
    *("model.delta.key_heads=2", "model.delta.value_heads=4", "model.delta.key_dim=4"),
    *("model.delta.value_dim=4", "model.ssd.heads=2", "model.ssd.head_dim=4", "model.ssd.state=4"),
    *("model.conv.taps=3", "model.layers=4"),
)


@pytest.mark.parametrize(
    "layout",
    [(), ("mesh.pipeline=2", "train.microbatch=8"), STATES],
    ids=["one device", "pipeline", "mixers with a state"],
)
def test_documents_are_apart_in_the_step(layout):
    """Two documents in one window have the loss that they have in windows of their own.

    So have two conversations, of which only some tokens are learned.
    """
    setup = prepared(*UNEVEN, *layout)
    losses = make_losses(setup)
    state = init_state(setup)
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 64, (16, 7)), rng.integers(0, 64, (16, 11))
    total, padding = 16, 64

    def batch(share: float, *documents: np.ndarray) -> dict[str, np.ndarray]:
        """A window that begins with these documents; what is left over is masked.

        Of each document a `share` of the tokens is learned, in all rows others.
        """
        lengths = [document.shape[1] - 1 for document in documents]
        left = total - sum(lengths)

        def row(parts, rest):
            joined = np.concatenate([*parts, np.broadcast_to(rest, (16, left))], 1)
            return joined.reshape(setup_shape + (total,))

        return {
            "tokens": row([document[:, :-1] for document in documents], 0).astype(np.int32),
            "targets": row([document[:, 1:] for document in documents], 0).astype(np.int32),
            "mask": row([learned(n, share) for n in lengths], 0).astype(np.float32),
            "segment_ids": row(
                [np.full((16, n), at) for at, n in enumerate(lengths)], padding
            ).astype(np.int32),
            "positions": row([np.tile(np.arange(n), (16, 1)) for n in lengths], 0).astype(np.int32),
            "sample": np.arange(16, dtype=np.uint32).reshape(setup_shape),
        }

    def learned(length: int, share: float) -> np.ndarray:
        return np.random.default_rng(length).random((16, length)) < share

    setup_shape = tuple(setup.batch_shape)
    run = jax.jit(losses)
    for share in (1.0, 0.4):
        together, *alone = (
            run(state.params, batch(share, *documents))
            for documents in ((first, second), (first,), (second,))
        )
        assert float(together["loss"]) == pytest.approx(
            sum(float(each["loss"]) for each in alone), rel=1e-6
        )
        counts = [learned(n, share).sum() for n in (6, 10)]
        assert float(together["tokens"]) == sum(counts) and (share == 1.0) == (sum(counts) == 256)


@pytest.mark.parametrize(
    "settings", [(), SEQUENCE_PARALLEL], ids=["whole stream", "sequence parallel"]
)
def test_devices_of_tensor_sum_different_tokens_over_the_stages(settings):
    """They hold the same activations; each of them summing all would carry as much again."""
    mesh = ("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2", "train.microbatch=2")
    layout = (*mesh, "model.layers=4", *settings)  # that no other test compiles
    setup = prepared(*layout)
    config = setup.config
    activation = 4 * config.train.microbatch * config.train.sequence_length * config.model.embed
    sums = [
        each.bytes
        for each in hlo.instructions(partitioned_text(*layout), setup.mesh.shape)
        if each.inside_loop and each.kind == "all-reduce" and "pipeline" in each.axis.split("+")
    ]
    assert max(sums) == activation // 2
