"""Models of one's own: whatever their dims are called, a mesh changes no loss, and what cannot be
is one line.
"""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_gradients_of_one_device, batches_of, mesh_of, prepared, tiny
from jax.sharding import PartitionSpec as P

from spmdtrain.checkpoints.restore import weights
from spmdtrain.config import ConfigError
from spmdtrain.models.abstract import build_model
from spmdtrain.models.buffer import Buffer
from spmdtrain.models.layers import Mlp, weight
from spmdtrain.models.stack import Stack
from spmdtrain.models.transformer import Block, Transformer
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.loop import run
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_gradients, make_losses

pytestmark = pytest.mark.long

SMALLEST = (
    "model.embed=16",
    "model.heads=2",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=8",
)
STAGES = ("mesh.pipeline=2", "train.microbatch=2")


def with_table(rows: int, name: str) -> type[Transformer]:
    class WithTable(Transformer):
        def __init__(self, config, rngs: nnx.Rngs):
            super().__init__(config, rngs)
            self.tokens.table_ve = weight(rngs, (rows, config.model.embed), (name, "embed"))

    return WithTable


Rows, MoreRows, FewRows = with_table(36, "rows"), with_table(36, "vocab"), with_table(24, "vocab")


class Cut(MoreRows):
    def head(self, x_bte, ctx):
        hidden_bte, table_ve = super().head(x_bte, ctx)
        return hidden_bte, table_ve[:32]


class Indexed(Transformer):
    def embed(self, tokens_bt, ctx):
        return ctx.constrain(self.tokens.table_ve[...][tokens_bt], "batch", "time", "embed")


class OtherLength(Transformer):
    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.blocks = Stack(lambda rngs: Block(config.model, rngs), 6, rngs)


class NoBlocks(Transformer):
    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.layers = self.blocks
        del self.blocks


class NoHead(nnx.Module):
    def __init__(self, config, rngs: nnx.Rngs):
        self.blocks = Stack(lambda rngs: Block(config.model, rngs), config.model.layers, rngs)

    def embed(self, tokens_bt, _):
        return tokens_bt


@cache
def first_batch(make, *settings: str) -> tuple[float, float, dict[str, np.ndarray]]:
    """(mean loss of training, of evaluation, gradients) of the initial weights."""
    setup = shard(tiny(*SMALLEST, *settings), make, jax.devices()[: mesh_of(settings)])
    gradients, losses = make_gradients(setup), make_losses(setup)
    state = init_state(setup)
    both = jax.jit(
        lambda params, step, batch: (gradients(params, step, batch), losses(params, batch))
    )
    with batches_of(setup) as ahead:
        (found, train), evaluation = jax.device_get(both(state.params, state.step, next(ahead)))
    means = (float(sums["loss"] / sums["tokens"]) for sums in (train, evaluation))
    return *means, plain_arrays(setup, found)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Rows, (*STAGES, "mesh.tensor=2", "rules.parameters.rows=")),
        (Rows, (*STAGES, "mesh.fsdp=2", "rules.parameters.rows=fsdp", "rules.parameters.embed=")),
        (Rows, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "rules.parameters.rows=tensor")),
        (MoreRows, (*STAGES, "mesh.tensor=2")),
    ],
    ids=["whole on stages", "gathered on stages", "split", "padded on stages"],
)
def test_a_table_of_any_name_and_length_has_the_loss_and_gradients_of_one_device(make, settings):
    whole = ("rules.parameters.rows=",) if make is Rows else ()
    *got, found = first_batch(make, *settings)
    *want, wanted = first_batch(make, *whole)
    assert got == pytest.approx(want, rel=1e-5)
    for path in wanted:
        assert np.max(np.abs(found[path] - wanted[path])) <= 1e-5 * np.max(np.abs(wanted[path])), (
            path
        )


@pytest.mark.parametrize(
    "settings",
    [
        (*STAGES, "mesh.fsdp=2", "rules.parameters.vocab=fsdp", "rules.parameters.embed="),
        (*STAGES, "mesh.expert=2", "rules.parameters.vocab=expert", "rules.parameters.ffn=expert"),
        ("mesh.expert=2", "mesh.context=2", "rules.parameters.vocab=context,expert"),
    ],
    ids=["fsdp on stages", "expert on stages", "context and expert"],
)
def test_weights_may_rest_split_over_the_axes_of_the_tokens(settings):
    assert_gradients_of_one_device((), settings, 1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("mesh.fsdp=2", "rules.activations.vocab=fsdp"),
            "'batch' and 'vocab' both use mesh axis 'fsdp'",
        ),
        (
            (*STAGES, "mesh.context=2", "rules.activations.vocab=context"),
            "'time' and 'vocab' both use mesh axis",
        ),
    ],
    ids=["fsdp", "context on stages"],
)
def test_logits_split_twice_over_one_axis_are_refused(settings, words):
    with pytest.raises(
        ConfigError, match=f"activation.*{words}.*try --set rules.activations.vocab="
    ):
        first_batch(Transformer, *settings)


@pytest.mark.parametrize(("make", "rows"), [(Cut, 36), (Indexed, 32)])
def test_a_part_of_a_table_taken_for_the_whole_is_refused(make, rows):
    message = (
        f"^tokens.table_ve: each of 2 stages has a part of {rows} rows, "
        "used as if it were the whole; try ctx.lookup"
    )
    with pytest.raises(ConfigError, match=message):
        first_batch(make, *STAGES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            OtherLength,
            r"blocks has 6 layers; found model.layers=2; "
            r"try Stack\(..., config.model.layers, ...\)",
        ),
        (
            NoBlocks,
            r"NoBlocks has no blocks, a Stack; "
            r"try self.blocks = Stack\(.*, config.model.layers, rngs\)",
        ),
        (NoHead, r"NoHead has no head; try def head\(self, x_bte, ctx\)"),
        (
            FewRows,
            r"head gives a table of 24 rows; found model.vocab=32; try config.model.vocab rows",
        ),
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_without_what_training_asks_for_is_refused_in_one_line(make, message, stages):
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        build_model(tiny(*SMALLEST), make, stages)
    assert "\n" not in str(refused.value)


def test_a_rule_for_a_dim_that_no_parameter_has_is_refused():
    with pytest.raises(
        ConfigError, match="parameters.nosuchthing: no parameter has a.*'nosuchthing'; found embed"
    ):
        prepared("rules.parameters.nosuchthing=fsdp")
    with pytest.raises(ConfigError, match="rules.parameters.rovs.*did you mean 'rows'"):
        build_model(tiny(*SMALLEST, "rules.parameters.rovs=fsdp"), Rows)
    assert (
        "rows"
        in build_model(tiny(*SMALLEST, "rules.parameters.rows="), Rows)
        .parameters["tokens.table_ve"]
        .axes
    )


@pytest.mark.parametrize(
    "settings",
    [
        ("mesh.fsdp=4", "model.embed=18", "model.heads=2"),
        ("mesh.tensor=2", "model.ffn=31"),
        ("mesh.context=2", "train.sequence_length=7"),
    ],
    ids=["embed", "ffn", "time"],
)
def test_what_does_not_divide_can_be_typed_as_it_is_said(settings):
    with pytest.raises(ConfigError, match="is not divisible by") as refused:
        prepared(*SMALLEST, *settings)
    prepared(
        *SMALLEST,
        *settings,
        *re.findall(r"--set ((?:model|train)\.\w+=\d+)", str(refused.value))[:1],
    )


class PlainMlp(nnx.Module):
    """Plain Flax: nothing names an axis."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.up = nnx.Linear(config.embed, 24, rngs=rngs)
        self.down_fe = nnx.Param(jax.random.normal(rngs.params(), (24, config.embed)) / 24)

    def __call__(self, x_bte, ctx):
        return ctx.constrain(
            jax.nn.relu(self.up(x_bte)) @ self.down_fe[...], "batch", "time", "embed"
        )


class TwoKinds(Transformer):
    """Blocks with the shipped mlp and with a plain one, in turns."""

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        kinds = [
            lambda rngs: Block(config.model, rngs),
            lambda rngs: Block(config.model, rngs, mlp=PlainMlp),
        ]
        self.blocks = Stack(kinds, config.model.layers, rngs)


@pytest.mark.parametrize(
    "settings",
    [
        ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
        (*STAGES, "mesh.tensor=2", "pipeline.schedule=zero_bubble"),
    ],
    ids=["split", "stages"],
)
def test_blocks_of_two_kinds_and_plain_parameters_have_the_gradients_of_one_device(settings):
    four = ("model.layers=4",)
    want_loss, want_eval, want = first_batch(TwoKinds, *four)
    loss, evaluation, found = first_batch(TwoKinds, *four, *settings)
    assert (loss, evaluation) == pytest.approx((want_loss, want_eval), rel=1e-5)
    assert {path for path in found if ".mlp.up." in path} == {
        "blocks.layer.block.1.mlp.up.kernel",
        "blocks.layer.block.1.mlp.up.bias",
    }
    assert found["blocks.layer.block.1.mlp.up.kernel"].shape == (2, 16, 24)
    for path in want:
        assert np.abs(want[path]).max() > 0, f"{path} is not trained"
        assert np.max(np.abs(found[path] - want[path])) <= 1e-5 * np.max(np.abs(want[path])), path


def test_a_number_of_layers_that_is_no_whole_round_is_refused():
    with pytest.raises(ConfigError, match="3 layers are not a whole number of rounds of 2 kinds"):
        build_model(tiny(*SMALLEST, "model.layers=3"), TwoKinds)


def test_names_of_activations_that_only_the_model_knows_are_taken():
    class Named(Transformer):
        def embed(self, tokens_bt, ctx):
            return ctx.constrain(super().embed(tokens_bt, ctx), "batch", "hands", "embed")

    shard(tiny(*SMALLEST, "rules.activations.hands="), Named, jax.devices()[:1])
    with pytest.raises(
        ConfigError,
        match="rules.activations.headz: no activation has a logical axis 'headz'; did you",
    ):
        shard(tiny(*SMALLEST, "rules.activations.headz="), Named, jax.devices()[:1])


class RandomFeatures(nnx.Module):
    """An mlp whose first matrix is random and stays so."""

    def __init__(self, config, rngs: nnx.Rngs):
        random = jax.random.normal(rngs.params(), (config.embed, 32))
        self.up_ef = Buffer(random, out_sharding=("embed", "ffn"))
        self.down_fe = weight(rngs, (32, config.embed), ("ffn", "embed"))

    def __call__(self, x_bte, ctx):
        h_btf = jax.nn.relu(x_bte @ self.up_ef[...])
        return ctx.constrain(h_btf @ self.down_fe[...], "batch", "time", "embed")


def test_a_buffer_rests_by_its_rules_and_is_saved_but_not_trained(tmp_path):
    make = partial(Transformer, mlp=RandomFeatures)
    settings = (*SMALLEST, "mesh.tensor=2", "train.steps=2", "optimizer.weight_decay=0.5")
    setup = shard(tiny(*settings), make, jax.devices()[:2])
    path = "blocks.layer.mlp.up_ef"
    assert setup.specs[path] == P(None, None, "tensor")
    assert path not in setup.update_rules and path not in setup.state.opt_state
    fresh = jax.device_get(init_state(setup).params)
    run(tiny(*settings), tmp_path, make=make, devices=jax.devices()[:2])
    trained = weights(tmp_path)
    assert np.array_equal(trained[path], fresh[path])
    assert not np.array_equal(
        trained["blocks.layer.mlp.down_fe"], fresh["blocks.layer.mlp.down_fe"]
    )


@pytest.mark.parametrize(
    ("kind", "values"), [(nnx.BatchStat, jnp.ones(3)), (nnx.Param, jnp.arange(3))]
)
def test_a_variable_that_nobody_would_update_is_refused(kind, values):
    class Model(Transformer):
        def __init__(self, config, rngs: nnx.Rngs):
            super().__init__(config, rngs)
            self.extra = kind(values)

    with pytest.raises(
        ConfigError,
        match=f"extra: a {kind.__name__} of .*; try floating nnx.Param or spmdtrain.Buffer",
    ):
        build_model(tiny(*SMALLEST), Model)


def test_a_forward_pass_that_changes_a_variable_is_refused_and_not_forgotten():
    """Running statistics, say: each step would begin with those of the first."""

    class Counts(Mlp):
        def __init__(self, config, rngs: nnx.Rngs):
            super().__init__(config, rngs)
            self.seen = Buffer(jnp.zeros(()))

        def __call__(self, x_bte, ctx):
            self.seen[...] += 1
            return super().__call__(x_bte, ctx)

    class CountsAtTheEnd(Transformer):
        def __init__(self, config, rngs: nnx.Rngs):
            super().__init__(config, rngs)
            self.seen = Buffer(jnp.zeros(()))

        def head(self, x_bte, ctx):
            self.seen[...] += 1
            return super().head(x_bte, ctx)

    said = "a forward pass changes {} of a {}, which no step keeps; try .*running statistics"
    with pytest.raises(ConfigError, match=said.format("seen", "CountsAtTheEnd")):
        build_model(tiny(*SMALLEST), CountsAtTheEnd)
    in_layers = partial(Transformer, mlp=Counts)
    for layout in ((), ("mesh.pipeline=2", "train.microbatch=4")):
        setup = shard(tiny(*SMALLEST, *layout), in_layers, jax.devices()[: mesh_of(layout)])
        with pytest.raises(ConfigError, match=said.format("mlp.seen", "Block")):
            lower_step(setup)
