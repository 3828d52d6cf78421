"""Memory: the state as the abstract state has it, and what a layer keeps as its jaxpr has it."""

from dataclasses import replace
from random import Random

import jax
import jax.numpy as jnp
import pytest
from helpers import prepared, tiny
from workloads import gpt, workload_with

from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import rematerialised, run_block
from spmdtrain.pipeline.layer_vjp import LayerGradient
from spmdtrain.planner.cost import memory, shape
from spmdtrain.planner.cost.workload import MeshShape, workload_of
from spmdtrain.planner.estimate import estimate
from spmdtrain.planner.own_model import with_traced_optimizer_state
from spmdtrain.planner.plan import plan
from spmdtrain.running.compile_step import lower_step
from spmdtrain.train.all_parts import FEATURES, item_names
from spmdtrain.train.state import bytes_per_device

LLAMA = (
    "model.name=llama",
    "model.layers=4",
    "model.embed=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=96",
    "model.vocab=64",
)
OPTIMIZERS = ("adafactor", "adamw", "lamb", "lion", "muon", "schedule_free_adamw", "sgd", "soap")
EXPERTS = ("model.experts.count=4", "model.experts.chosen=2")
VARIED = [
    (*LLAMA, "model.norm_places=both", "model.query_norm=head", "model.windows=3,0"),
    (*LLAMA, "model.norm_places=after", "model.query_norm=all", "model.sinks=true"),
    (*LLAMA, "model.query_norm=head", "model.output_gate=channel"),
    (*LLAMA, "model.output_gate=head", "model.mlp=xielu"),
    (
        *(each for each in LLAMA if "kv_heads" not in each),
        *("model.latent.rank=16", "model.latent.query_rank=24"),
        *("model.latent.plain_dim=8", "model.latent.rope_dim=4", "model.latent.value_dim=6"),
    ),
    (*LLAMA, "model.mlps=none", "model.query_norm=head"),  # layers of one part
    (*LLAMA, "model.mixers=none", "model.norm_places=both"),
]
GRID = {
    "layers": (2, 3),
    "embed": (32, 48),
    "heads": (4, 8),
    "kv_heads": (1, 2, 4),
    "head_dim": ("none", 10),
    "ffn": ("none", 40),
    "vocab": (64, 71),
    "positions": ("learned", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "gelu_exact", "relu2", "xielu", "swiglu", "geglu"),
    "bias": ("true", "false"),
    "qkv_bias": ("none", "true", "false"),
    "out_bias": ("none", "true", "false"),
    "mlp_bias": ("none", "true", "false"),
    "tied": ("true", "false"),
    "query_norm": ("none", "head", "all"),
    "output_gate": ("none", "channel", "head"),
    "norm_places": ("before", "after", "both", "parallel"),
    "sinks": ("true", "false"),
    "windows": ("[]", "3,0"),
}
LAYOUTS = [
    ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1", "optimizer.ema=0.9"),
    ("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2", "train.zero=1", "train.remat=dots"),
    (*LLAMA, "mesh.fsdp=4", "mesh.tensor=2", "train.remat=full"),
    (
        *LLAMA,
        "mesh.pipeline=2",
        "mesh.fsdp=2",
        "train.microbatch=4",
        "pipeline.schedule=interleaved",
        "pipeline.chunks=2",
    ),
]


@pytest.mark.parametrize("overrides", LAYOUTS)
@pytest.mark.seconds
def test_argument_bytes_of_the_compiled_step(overrides):
    setup = prepared(*overrides)
    compiled = lower_step(setup).compile().memory_analysis()
    batch = dict(setup.batch)
    batch.pop("sample")  # only dropout needs the sample indices
    state = memory.exact_state(setup.config, dict(setup.mesh.shape))
    assert sum(state) + bytes_per_device(batch) == compiled.argument_size_in_bytes


@pytest.mark.core
def test_the_closed_form_of_the_state_is_close():
    for overrides in LAYOUTS:
        config = tiny(*overrides, "model.embed=256", "model.ffn=1024")
        sizes = dict(config.mesh.sizes)
        exact = memory.exact_state(config, sizes)
        closed_form = memory.closed_form_state(workload_of(config, sizes))
        assert closed_form == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("layers", "data", "fsdp", "tensor"),
    [(4, 2, 2, 2), (3, 2, 2, 2), (3, 3, 2, 2), (4, 3, 2, 2), (4, 3, 2, 1), (4, 3, 1, 2)],
)
def test_the_closed_form_knows_what_zero_leaves_whole(layers, data, fsdp, tensor):
    """By the layers, beside fsdp, by the layers again, not at all, padded, padded."""
    settings = (
        f"model.layers={layers}",
        "model.embed=256",
        "model.ffn=1024",
        "train.zero=1",
        "train.global_batch=12",
        f"mesh.data={data}",
        f"mesh.fsdp={fsdp}",
        f"mesh.tensor={tensor}",
    )
    config = tiny(*settings)
    sizes = dict(config.mesh.sizes)
    closed_form = memory.closed_form_state(workload_of(config, sizes))
    assert closed_form == pytest.approx(memory.exact_state(config, sizes), rel=0.05)


@pytest.mark.parametrize(
    "mesh",
    [
        (),
        ("mesh.data=2", "train.zero=1"),
        ("mesh.fsdp=2", "mesh.tensor=2"),
        ("mesh.pipeline=2", "mesh.tensor=2"),
    ],
)
@pytest.mark.parametrize("also", [(), ("finetune.also_train=tokens.*",), ("finetune.base=nf4",)])
def test_the_closed_form_knows_what_is_frozen(mesh, also):
    """Narrow and without moments, next to adapters that have both."""
    settings = ("finetune.kind=dora", "precision.frozen=bfloat16", "model.embed=256", *also)
    config = tiny(*settings, *mesh)
    sizes = dict(config.mesh.sizes)
    exact = memory.exact_state(config, sizes)
    assert memory.closed_form_state(workload_of(config, sizes)) == pytest.approx(exact, rel=0.03)
    if not mesh and not also:
        full = memory.exact_state(tiny("model.embed=256"), sizes)
        assert exact[0] < 0.6 * full[0]
        assert exact[1] < 0.1 * full[1]


# What adds to the state, by the items that it adds, and by optimizer.
ADDS = {
    **{", ".join(feature.items): feature.example for feature in FEATURES if feature.example},
    "errors": ("compression.codec=topk",),
    "moments in bfloat16": ("optimizer.moment_dtype=bfloat16",),
    "moments in 8 bits": ("optimizer.moment_dtype=8bit",),
    **{f"state of {name}": (f"optimizer.name={name}",) for name in OPTIMIZERS},
    "adapters with an average": ("finetune.kind=lora", "optimizer.ema=0.9"),
}
SHARDED = [
    ("mesh.data=4", "mesh.tensor=2"),
    ("mesh.data=2", "mesh.fsdp=2", "mesh.context=2"),
    ("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2", "train.microbatch=2"),
]
WIDE = ("model.embed=1024", "model.ffn=4096", "model.heads=8", "model.vocab=4096")


def test_each_item_of_the_state_is_one_that_the_planner_is_held_to():
    named = {name for names in ADDS for name in names.split(", ")}
    # A teacher's weights count with the parameters: test_teacher.py.
    assert set(item_names()) - {"teacher"} <= named


@pytest.mark.parametrize("layout", SHARDED, ids=" ".join)
@pytest.mark.parametrize("adds", ADDS)
def test_a_search_counts_what_a_setting_adds_to_the_state(adds, layout):
    """It divides what one device holds among the devices of each mesh that it tries."""
    if adds == "magnitudes" and "mesh.pipeline=2" in layout:
        layout = SHARDED[0]  # pipelines have none
    config = tiny(*WIDE, *ADDS[adds], *layout)
    sizes = dict(config.mesh.sizes)
    alone = tiny(*WIDE, *ADDS[adds])
    searched = with_traced_optimizer_state(alone, workload_of(alone, alone.mesh.sizes))
    closed_form = memory.closed_form_state(replace(searched, mesh=MeshShape(**sizes)))
    exact = memory.exact_state(config, sizes)
    # Vectors, and factors of matrices, are whole on each device: half a MiB of 50 and more.
    assert closed_form == pytest.approx(exact, rel=0.03, abs=2**19)


def test_a_check_that_takes_a_step_again_holds_two_more_states():
    """As running/guards/other_devices.py copies it: what is kept, and what moves."""
    plain, checked = (
        estimate(tiny(*LAYOUTS[0], *settings), 8, "h100").memory
        for settings in ((), ("guard.replay_check=5",))
    )
    state = plain.parameters + plain.optimizer
    assert checked.total == plain.total + 2 * state
    assert checked.of_step == plain.total
    searched = plan(tiny("guard.replay_check=5"), 8, "h100")[0].memory
    assert searched.copies == 2 * (searched.parameters + searched.optimizer)


def _kept_and_deferred(config) -> tuple[int, int]:
    """Bytes of (LayerGradient.saved, LayerGradient.deferred) for two sequences.

    The second is 0 where the backward is not split.
    """
    blueprint = build_model(config)
    dtype = jnp.dtype(config.precision.compute)
    weights = {
        path: jax.ShapeDtypeStruct(p.shape[1:], jnp.float32 if p.is_full_precision else dtype)
        for path, p in blueprint.parameters.items()
        if path.startswith("blocks")
    }
    sequence = config.train.sequence_length
    ctx = ForwardContext(positions_bt=jnp.zeros((2, sequence), jnp.int32), remat=config.train.remat)

    def layer(weights, x, number):
        y, _ = run_block(blueprint.bind(weights).blocks.layer, x, ctx, number)
        return y, jnp.float32(0)

    x = jax.ShapeDtypeStruct((2, sequence, config.model.embed), dtype)
    layer = rematerialised(layer, config.train.remat)
    split = config.train.remat == "none"
    found = LayerGradient(layer, weights, x, jax.ShapeDtypeStruct((), jnp.int32), split=split)
    return _bytes(found.saved), _bytes(found.deferred) if split else 0


def _bytes(leaves) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("remat", ["none", "dots"])
@pytest.mark.parametrize("model", [(), LLAMA, *VARIED])
def test_what_a_layer_keeps(model, remat):
    config = tiny(
        *model, f"train.remat={remat}", "precision.compute=bfloat16", "train.global_batch=2"
    )
    workload = workload_of(config, dict(config.mesh.sizes))
    kept, deferred = _kept_and_deferred(config)
    assert memory.kept_bytes(workload) == kept
    if remat == "none":
        assert memory.deferred_bytes(workload) == deferred


@pytest.mark.parametrize("seed", range(12))
def test_the_planner_counts_the_parameters_of_the_model(seed):
    """Of settings drawn from a grid."""
    random = Random(seed)
    drawn = {name: random.choice(values) for name, values in GRID.items()}
    config = tiny("model.name=llama", *(f"model.{name}={value}" for name, value in drawn.items()))
    model = workload_of(config, dict(config.mesh.sizes)).model
    assert shape.parameters(model) == build_model(config).size, drawn


def test_memory_follows_the_settings():
    workload = workload_with(
        gpt(layers=24, embed=1024, heads=16, vocab=32768),
        sequence_length=1024,
        global_batch=64,
        microbatch=1,
        mesh=MeshShape(pipeline=4, data=2),
        remat="full",
    )

    def held(global_batch: int = 64, **layout) -> memory.Memory:
        batch = workload.with_settings(train={"global_batch": global_batch})
        return memory.step_memory(replace(batch, **layout))

    before = held()
    categories = before.by_category()
    assert categories.pop("total") == before.total == sum(categories.values())
    # The stash does not grow with the number of microbatches, but for GPipe.
    assert held(global_batch=128).activations == before.activations
    assert held(global_batch=128, schedule="gpipe").activations > 3 * before.activations
    assert held(zero=1).optimizer * 2 == before.optimizer
    assert held(zero=1).parameters * 2 == before.parameters
    assert held(remat="none").activations > 10 * before.activations


def test_a_turn_of_several_layers_gathers_all_of_them():
    """Models of the same layers, in rounds of two and of four."""
    sizes = ("key_heads=2", "value_heads=4", "key_dim=8", "value_dim=6")
    delta = [f"model.delta.{size}" for size in sizes]
    mesh = ("mesh.fsdp=8", "model.layers=8", "train.scan_layers=true", "model.name=llama")

    def workload(mixers: list[str]):
        config = tiny(*mesh, *delta, "model.vocab=64", f"model.mixers={mixers}")
        return estimate(config, 8, "h100")

    twos = workload(["delta", "attention"])
    fours = workload(["delta", "delta", "attention", "attention"])
    layer = shape.layer_parameters(fours.workload.model)
    more = fours.memory.total - twos.memory.total
    assert more == pytest.approx(2 * layer * (fours.workload.compute_bytes + 4), rel=0.01)


def test_both_tables_of_a_large_vocabulary_have_whole_gradients_at_the_end_of_a_microbatch():
    """In float32, before they are scattered, and that of the head in what is computed with."""

    def total(vocab: int, tied: bool) -> int:
        model = ("model.layers=1", "model.embed=64", f"model.vocab={vocab}", f"model.tied={tied}")
        layout = ("mesh.fsdp=4", "train.microbatch=1", "precision.compute=bfloat16")
        config = tiny(*model, *layout)
        return memory.step_memory(workload_of(config, dict(config.mesh.sizes))).total

    elements = 2**20 * 64
    grown = total(2**21, tied=False) - total(2**20, tied=False)
    at_rest = 2 * elements / 4 * (3 * 4 + 4 + 2 + 2)  # weights, moments; sums, copy, gradients
    assert grown == pytest.approx(at_rest + (2 * 4 + 2) * elements, rel=1e-3)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("scans", [False, True])
def test_the_gradient_of_the_embedding_is_scattered_beside_what_written_out_layers_keep(
    scans, accumulation
):
    """In float32, if a step has several microbatches; a loop over layers keeps nothing then."""

    def held(vocab: int, remat: str = "dots") -> memory.Memory:
        model = ("model.embed=64", f"model.vocab={vocab}")
        steps = (f"train.global_batch={4 * accumulation}", "train.microbatch=1")
        layout = ("mesh.data=4", f"train.scan_layers={scans}", f"train.remat={remat}", *steps)
        config = tiny(*model, *layout, "model.tied=false", "precision.compute=bfloat16")
        return memory.step_memory(workload_of(config, dict(config.mesh.sizes)))

    elements = 2**20 * 64
    wide, narrow = held(2**21), held(2**20)
    sums = 4 if accumulation > 1 else 0
    of_both_tables = 2 * elements * (3 * 4 + 2 + 2 + sums)  # weights, moments; a copy, gradients
    scattered = 4 * elements if sums and not scans else 0
    assert wide.total - narrow.total == pytest.approx(of_both_tables + scattered, rel=1e-3)
    if scattered:
        less = held(2**21, "full")
        assert wide.total - less.total == wide.activations - less.activations > 0
        assert wide.logits == 0


def test_recurrences_of_a_turn_have_their_arrays_at_once():
    sizes = ("key_heads=2", "value_heads=4", "key_dim=8", "value_dim=6", "taps=3")
    delta = [f"model.delta.{size}" for size in sizes]

    def bytes_of(mixers: list[str], *settings: str) -> float:
        model = ("model.vocab=64", "model.layers=8", f"model.mixers={mixers}")
        config = tiny(*delta, *model, *settings)
        workload = workload_of(config, dict(config.mesh.sizes))
        return memory._recurrence_bytes(workload) / workload.tokens / workload.compute_bytes

    outputs, inputs = 4 * 6, 2 * 2 * 8 + 4 * 6
    loop = "train.scan_layers=true"
    one = bytes_of(["delta"], loop)
    assert one == outputs + inputs
    assert bytes_of(["delta", "attention", "delta", "delta"], loop) == 3 * one
    assert bytes_of(["delta"], loop, "train.remat=full") == 2 * outputs + inputs
    pieces = bytes_of(["delta"], loop, "mesh.context=2", "model.context_attention=ring")
    assert pieces == outputs + 2 * inputs
