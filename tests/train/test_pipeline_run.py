"""Pipelines as a run has them: memory, what crosses which mesh axis, evaluation, checkpoints,
refusals, own models.
"""

import itertools
import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, batches_of, compiled_step, mesh_of, prepared, tiny, trained
from jax.sharding import NamedSharding
from shares import rest

import spmdtrain as st
from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import identity
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.compiled import hlo
from spmdtrain.compiled.step_memory import memory_of
from spmdtrain.config import CheckpointError, ConfigError
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.data.source import open_data
from spmdtrain.models.layers import Mlp
from spmdtrain.models.stack import Stack
from spmdtrain.models.transformer import Block, Transformer
from spmdtrain.running import loop
from spmdtrain.running.compile_step import lower_step
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard
from spmdtrain.train.state import parameter_specs
from spmdtrain.train.step import make_step

pytestmark = pytest.mark.long

ONE_F_ONE_B = ("mesh.pipeline=4", "train.microbatch=2", "model.layers=8")
INTERLEAVED = (*ONE_F_ONE_B, "pipeline.schedule=interleaved", "pipeline.chunks=2")
# Activations weigh more than the table's few columns.
LARGE = ("model.embed=64", "train.sequence_length=64")


def batch(microbatches: int, shards: int = 1) -> str:
    return f"train.global_batch={2 * shards * microbatches}"


# Memory and compiled text


def instructions(step: jax.stages.Compiled) -> int:
    """Of the program; the text also lists the source lines that they came from."""
    return step.as_text().count(" = ")


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [(ONE_F_ONE_B, "full"), (INTERLEAVED, "full"), (INTERLEAVED, "none")],
    ids=["1f1b full", "interleaved full", "interleaved none"],
)
def test_memory_and_program_do_not_grow_with_the_number_of_microbatches(schedule, remat):
    few, many = (
        compiled_step(*schedule, *LARGE, f"train.remat={remat}", batch(m)) for m in (8, 64)
    )
    assert memory_of(many).temp_bytes <= 1.02 * memory_of(few).temp_bytes
    assert instructions(many) <= 1.1 * instructions(few)


def test_full_remat_recomputes():
    """More matmuls in the program, less memory in its stash."""
    kept, again = (
        compiled_step(*ONE_F_ONE_B, *LARGE, f"train.remat={remat}", batch(8))
        for remat in ("none", "full")
    )
    matmuls = [len(re.findall(r"= \S+ dot\(", step.as_text())) for step in (kept, again)]
    assert matmuls[1] > matmuls[0]
    assert memory_of(again).temp_bytes < memory_of(kept).temp_bytes


def test_the_program_does_not_grow_with_the_number_of_layers():
    few = compiled_step(*ONE_F_ONE_B, *LARGE, "train.remat=none", batch(8))
    many = compiled_step(*ONE_F_ONE_B, *LARGE, "train.remat=none", batch(8), "model.layers=32")
    assert instructions(many) <= 1.1 * instructions(few)


def test_no_stage_holds_gradients_of_all_stages():
    settings = (*INTERLEAVED, "mesh.data=2", batch(8, 2))
    setup = prepared(*settings)
    text = compiled_step(*settings).as_text()
    for path, parameter in setup.model.parameters.items():
        if setup.model.in_stack(path) and len(parameter.shape) > 4:
            whole, own = parameter.shape, (*parameter.shape[:1], 1, *parameter.shape[2:])
            assert f"f32[{','.join(map(str, own))}]" in text, path
            assert f"f32[{','.join(map(str, whole))}]" not in text, path


def crossings(*settings: str) -> list[hlo.Collective]:
    return list(
        hlo.instructions(compiled_step(*settings).as_text(), prepared(*settings).mesh.shape)
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("settings", "axis"),
    [
        (("mesh.data=2", batch(8, 2)), "data"),
        (("mesh.fsdp=2", "train.remat=full", batch(8, 2)), "fsdp"),
        (("mesh.tensor=2", "train.remat=dots", "precision.compute=bfloat16", batch(8)), "tensor"),
    ],
    ids=["data", "fsdp", "tensor"],
)
def test_only_stages_and_tensor_talk_inside_the_ticks_and_nothing_in_a_conditional(settings, axis):
    found = crossings(*INTERLEAVED, *settings)
    ticking = {part for each in found if each.inside_loop for part in each.axis.split("+")}
    assert ticking - {"none"} == {"pipeline", "tensor"} & {"pipeline", axis}
    assert not any(each.inside_conditional for each in found)
    permutes = [each for each in found if each.kind == "collective-permute"]
    assert {each.axis for each in permutes} == {"pipeline"}
    assert all(each.inside_loop for each in permutes)


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_cross_the_data_axis_once_and_only_activations_are_gathered_over_tensor(zero):
    settings = (
        "mesh.pipeline=2",
        "mesh.data=2",
        "mesh.tensor=2",
        "train.microbatch=2",
        f"train.zero={zero}",
    )
    found = crossings(*settings)
    over_data = [
        each for each in found if "data" in each.axis.split("+") and each.kind != "all-gather"
    ]
    setup = prepared(*settings)
    whole_over_data = parameter_specs(setup.model, setup.rules)
    specs = {path: NamedSharding(setup.mesh, spec) for path, spec in whole_over_data.items()}
    shapes = {path: p.shape for path, p in setup.model.parameters.items()}
    gradients = sum(4 * int(np.prod(specs[path].shard_shape(shapes[path]))) for path in shapes)
    crossed = sum(each.bytes * (2 if each.kind == "reduce-scatter" else 1) for each in over_data)
    assert not any(each.inside_loop for each in over_data)
    assert gradients <= crossed <= gradients + 4 * (3 + len(shapes))
    tokens = 2 * setup.config.train.sequence_length
    activation = 4 * tokens * setup.config.model.embed
    over_tensor = [each for each in found if each.kind == "all-gather" and "tensor" in each.axis]
    assert {each.bytes for each in over_tensor} == {activation}


# A run


@pytest.mark.parametrize(
    "layout",
    [("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2"), ("mesh.data=2", "mesh.fsdp=2")],
    ids=["pipeline", "no pipeline"],
)
def test_evaluation_is_that_of_one_device(layout):
    values = []
    for settings in ((), (*layout, "train.microbatch=2")):
        whole = (
            "model.layers=3",
            "eval.every=1",
            "eval.batches=3",
            "model.dropout=0.1",
            "data.packing=documents",
        )
        setup = prepared(*whole, *settings)
        evaluate = st.make_evaluate(setup, open_data(setup.config)[1])
        values.append(evaluate(init_state(setup)))
    assert values[1] == pytest.approx(values[0], rel=1e-5)


def test_bfloat16_stays_near_float32_and_keeps_float32_weights():
    layout = (
        "mesh.pipeline=2",
        "mesh.fsdp=2",
        "train.microbatch=2",
        "train.remat=full",
        "precision.compute=bfloat16",
    )
    losses, state, _ = trained(*layout)
    want, _, _ = trained()
    assert np.max(np.abs(losses - want) / want) < 0.02
    assert losses[-1] < losses[0] - 0.2
    assert {x.dtype for x in state.params.values()} == {jnp.dtype("float32")}


LAYOUTS = {
    "none": (),
    "p2 v3": ("mesh.pipeline=2", "pipeline.schedule=interleaved", "pipeline.chunks=3"),
    "p4 v2, padded": (
        "mesh.pipeline=4",
        "pipeline.schedule=interleaved",
        "pipeline.chunks=2",
        "mesh.tensor=2",
    ),
    "p8, padded": ("mesh.pipeline=8",),
    "data": ("mesh.data=2", "mesh.fsdp=2", "train.zero=1"),
    "thirds": ("mesh.data=3", "train.zero=1", "train.global_batch=15"),
}
# Every mesh pads this vocabulary otherwise.
ODD = ("model.layers=6", "model.vocab=67", "train.microbatch=1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> the run directory and state of a checkpoint in it. All hold the same numbers, none
    of them zero.
    """
    found = {}
    for name, settings in LAYOUTS.items():
        setup = prepared(*ODD, *settings)
        state = init_state(setup)

        def numbered(path, tree, setup=setup):
            in_stack, layout, padding = (
                setup.model.in_stack(path),
                setup.model.stage_layout,
                setup.padding,
            )

            def leaf(x):
                x = np.asarray(x)
                real = layout.unstaged(x) if in_stack else x
                values = np.sin(1 + np.arange(real.size)).reshape(real.shape).astype(real.dtype)
                return layout.staged(values) if in_stack else values

            shardings = jax.tree.map(lambda x: x.sharding, tree)
            values = jax.tree.map(leaf, padding.tree_from_rest(path, tree))
            return jax.device_put(padding.tree_to_rest(path, values), shardings)

        moments = {path: numbered(path, tree) for path, tree in state.opt_state.items()}
        state = replace(state, opt_state=moments, step=jnp.int32(7))
        directory = tmp_path_factory.mktemp("saved")
        checkpoints = Checkpoints(directory, setup, keep=Retention(CheckpointConfig(keep=1)))
        checkpoints.save(7, state, identity(setup, "", {}))
        checkpoints.close()
        found[name] = setup, directory, state
    return found


# Around, each layout is left once and entered once; any other pair goes through the same two
# reshapes, and takes its turn with the slow tests.
AROUND = [*itertools.pairwise([*LAYOUTS, next(iter(LAYOUTS))])]
OTHER_PAIRS = sorted({*itertools.permutations(LAYOUTS, 2)} - {*AROUND})


@pytest.mark.parametrize(
    ("source", "target"),
    [*AROUND, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHER_PAIRS)],
)
def test_a_checkpoint_of_any_layout_is_restored_into_any_other(saved, source, target):
    directory = saved[source][1]
    setup, _, want = saved[target]
    checkpoints = Checkpoints(directory, setup, keep=None)
    got, meta = checkpoints.restore(7, setup.state)
    assert meta["layout"] == saved[source][0].model.stage_layout.describe()
    assert_same_bits(got, want)
    for ours, asked in zip(jax.tree.leaves(got), jax.tree.leaves(setup.state), strict=True):
        assert ours.sharding.is_equivalent_to(asked.sharding, ours.ndim)
    assert_same_bits(checkpoints.restore_params(7, setup.state.params)[0], want.params)
    checkpoints.close()


def test_another_vocabulary_is_refused_even_where_the_padded_shapes_agree(saved):
    setup = prepared(*ODD, "model.vocab=68", *LAYOUTS["thirds"])
    checkpoints = Checkpoints(saved["thirds"][1], setup, keep=None)
    assert (
        setup.state.params["tokens.table_ve"].shape
        == saved["thirds"][2].params["tokens.table_ve"].shape
    )
    with pytest.raises(
        CheckpointError,
        match=r"tokens.table_ve.*; asked float32\[68, 32\]; found float32\[67, 32\]",
    ):
        checkpoints.restore(7, setup.state)
    checkpoints.close()


def test_weights_alone_are_those_of_the_model(saved):
    weights = [st.weights(directory) for _, directory, _ in saved.values()]
    assert weights[0]["tokens.table_ve"].shape == (67, 32)
    for others in weights[1:]:
        assert_same_bits(others, weights[0])


def test_another_number_of_layers_is_refused_even_where_the_padded_shapes_agree(saved):
    setup = prepared(*ODD, "model.layers=7", *LAYOUTS["p8, padded"])
    checkpoints = Checkpoints(saved["p8, padded"][1], setup, keep=None)
    with pytest.raises(CheckpointError, match=r"asked model.layers=7; found 6 layers"):
        checkpoints.restore(7, setup.state)
    checkpoints.close()


def run(directory, *settings: str) -> list[float]:
    """Losses of all steps so far, at most one line each."""
    config = tiny(
        "train.steps=12",
        "optimizer.schedule=constant",
        "model.layers=4",
        "model.dropout=0.1",
        *settings,
    )
    loop.run(config, directory, devices=jax.devices()[: mesh_of(settings)])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@rest("the draw of fuzz/test_fuzz.py does it too")
def test_a_run_goes_on_without_its_pipeline_as_if_nothing_had_happened(tmp_path):
    want = run(tmp_path / "one device", "train.microbatch=2")
    piped = ("mesh.pipeline=2", "mesh.data=2", "pipeline.schedule=interleaved", "pipeline.chunks=2")
    run(tmp_path / "moved", *piped, "train.steps=6", "train.microbatch=2")
    got = run(tmp_path / "moved", "train.microbatch=2")
    assert got == pytest.approx(want, rel=1e-5)


# Own models


class Sided(Mlp):
    """A part with losses of its own: shares of the mean square of what it gives, summed over
    tokens, and the number of its layer at each of them.
    """

    share = 0.01

    def __call__(self, x_bte, ctx):
        y = super().__call__(x_bte, ctx) * (1 + ctx.layer)
        squared = self.share * jnp.square(y).mean(-1).sum()
        absolute = self.share * jnp.abs(y).mean(-1).sum()
        return y, {"squared": squared, "absolute": absolute, "layers": y[..., 0].size * ctx.layer}


class Careless(Sided):
    share = 0.0


def transformer_of(block):
    class Made(Transformer):
        def __init__(self, config, rngs: nnx.Rngs):
            super().__init__(config, rngs)
            self.blocks = Stack(lambda rngs: block(config.model, rngs), config.model.layers, rngs)

    return Made


def test_side_losses_of_layers_are_trained_on_alike_with_and_without_a_pipeline():
    found = []
    piped = ("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2")
    for mlp, settings in ((Sided, ("train.microbatch=4",)), (Sided, piped), (Careless, ())):
        make = partial(Transformer, mlp=mlp)
        setup = shard(tiny("model.layers=3", *settings), make, jax.devices()[: mesh_of(settings)])
        state = init_state(setup)
        step = make_step(setup)
        with batches_of(setup) as ahead:
            sums = []
            for _ in range(3):
                state, metrics = step(state, next(ahead))
                names = ("loss", "squared", "grad_norm", "absolute", "layers")
                sums.append([float(metrics[name]) for name in names])
        found.append(sums)
    plain, piped, careless = found
    assert plain[0][1] > 0 and plain[0][-1] == 0 + 1 + 2
    assert piped == pytest.approx(np.array(plain), rel=1e-5)
    assert careless[0][0] == pytest.approx(plain[0][0], rel=1e-6), "the same weights"
    assert careless[0][2] != pytest.approx(plain[0][2], rel=1e-5), "but other gradients"


def test_layers_without_side_losses_report_none_with_and_without_a_pipeline():
    for settings in ((), (*ONE_F_ONE_B, batch(8))):
        _, metrics = lower_step(prepared(*settings)).out_info
        assert metrics.keys() == {"loss", "grad_norm", "learning_rate", "tokens"}


def test_a_side_loss_of_one_scalar_is_called_so():
    class Lone(Block):
        def __call__(self, x_bte, ctx):
            return super().__call__(x_bte, ctx), jnp.float32(1)

    setup = shard(tiny(), transformer_of(Lone), jax.devices()[:1])
    _, metrics = lower_step(setup).out_info
    assert "side_loss" in metrics


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": 1.0}, "'loss', like another figure of a step"),
        ({"own": jnp.ones(3)}, r"shape \[3\]"),
    ],
    ids=["name of the loss", "an array"],
)
def test_what_is_no_side_loss_costs_one_line(given, said):
    class Wrong(Block):
        def __call__(self, x_bte, ctx):
            return super().__call__(x_bte, ctx), given

    with pytest.raises(ConfigError, match=said):
        lower_step(shard(tiny(), transformer_of(Wrong), jax.devices()[:1]))


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            (*INTERLEAVED, "train.global_batch=12"),
            r"microbatches=6 with stages=4, chunks=2.*microbatches=4 or microbatches=8",
        ),
        (
            ("mesh.pipeline=2", "pipeline.schedule=1f1b", "pipeline.chunks=2"),
            "pipeline.chunks=2: 1f1b has one chunk",
        ),
        (
            ("mesh.pipeline=2", "pipeline.schedule=zero_bubble", "train.remat=full"),
            "zero_bubble splits a layer",
        ),
        (("pipeline.schedule=2f2b",), "'2f2b' is none of gpipe, 1f1b, interleaved, zero_bubble"),
        (
            ("mesh.pipeline=2", "rules.parameters.ffn=pipeline"),
            "mesh axis 'pipeline' is split by the training step",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_said_in_one_line(settings, message):
    with pytest.raises(ConfigError) as refused:
        prepared(*settings)
    assert re.search(message, str(refused.value))
    assert "\n" not in str(refused.value)


def test_abstract_state_splits_layers_over_stages_and_the_vocabulary_over_stages_and_tensor():
    setup = prepared(*INTERLEAVED, "mesh.tensor=2", batch(8))
    abstract = setup.state
    qkv, table = (
        abstract.params["blocks.layer.attention.qkv_eknd"],
        abstract.params["tokens.table_ve"],
    )
    assert qkv.shape[:3] == (2, 4, 1)
    assert qkv.sharding.shard_shape(qkv.shape)[:3] == (2, 1, 1)
    assert table.sharding.shard_shape(table.shape)[0] * 8 == table.shape[0]
    count = abstract.opt_state["blocks.layer.attention.qkv_eknd"][0].count
    assert count.sharding.shard_shape(count.shape) == (2, 1, 1)
