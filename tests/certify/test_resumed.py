"""A state that is carried through layouts stays the same, and one that does not is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz.campaign import ROOT
from helpers import tiny
from models.families import rich
from shares import rest
from test_certify import BASE, TINY

from spmdtrain.checkpoints.leaves import relayout
from spmdtrain.config import RunConfig, load
from spmdtrain.config.schema import ScheduleFreeAdamW
from spmdtrain.data.source import open_data
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.shrink import shrink
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.witnesses.float64_adam import follow
from spmdtrain.lab.certify.witnesses.resume import (
    ALONE,
    SETTINGS,
    move_through,
    resumed,
    with_settings,
)
from spmdtrain.models.abstract import Parameter
from spmdtrain.train.compared.in_order import STEP, Leaf, Plain, plain_state
from spmdtrain.train.updates.shipped_optimizers import make_optimizer

PADDED = Layout(("mesh.data=3", "train.zero=1"), "given")
FEW_LEAVES = ("model.layers=2", "model.bias=false", "optimizer.name=lion", "optimizer.ema=none")


@pytest.fixture(scope="module")
def small():
    return shrink(load(BASE, (*TINY, *FEW_LEAVES)), as_is=True).config


@pytest.fixture(scope="module")
def plain(small) -> Plain:
    return numbered_state(small)


def numbered_state(config: RunConfig) -> Plain:
    """A state of which no two elements of a leaf are the same, made without a step."""
    setup = Own().shard(open_data(config)[0], jax.devices()[:1])

    def numbered(x):
        return np.sin(1 + np.arange(x.size)).reshape(x.shape).astype(x.dtype)

    return plain_state(setup, jax.tree.map(numbered, setup.state)) | {Leaf(STEP): np.int32(7)}


def through(small, plain: Plain) -> str:
    return move_through(small, [ALONE, PADDED, ALONE], plain, Own())


@pytest.mark.long
def test_a_state_is_the_same_in_every_layout(small, plain):
    assert through(small, plain) == ""


STAGES = ("mesh.pipeline=2", "mesh.fsdp=2", "train.microbatch=6")
SHARDS = ("mesh.fsdp=2", "mesh.context=2")
DELTA = ("key_heads=2", "value_heads=4", "key_dim=4", "value_dim=6", "decay=channel", "gate_rank=3")
LATENT = ("rank=16", "query_rank=8", "plain_dim=6", "rope_dim=4", "value_dim=5")
KINDS = {
    "channels, latents, and further tokens": (
        *(x for x in rich("convolved") if "kv_heads" not in x and "head_dim" not in x),
        *("model.layers=3", "model.mixers=['delta', 'attention', 'conv']", "model.query_norm=none"),
        *(f"model.delta.{size}" for size in DELTA),
        *(f"model.latent.{size}" for size in LATENT),
        *("model.experts.first_dense=0", "model.multi_token.depth=1"),
        "model.multi_token.after_norm=true",
    ),
    "experts beside, and shared keys": rich("beside, sharing"),
    "blocks of positions": rich("chunked", "model.layers=4", "model.chunks=6,0"),
    "side by side": rich("side by side"),
}
HAS_STAGES = ("blocks of positions", "side by side")


@rest("half a minute each; a state moves below, and test_resume.py resumes a run")
@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_layers_of_each_kind_goes_on_to_the_bit(name):
    """Stopped twice, and its state in another layout and back."""
    config = shrink(tiny(*KINDS[name]), as_is=True).config
    layout = Layout(STAGES if name in HAS_STAGES else SHARDS, "given")
    for witness in resumed(config, [layout], numbered_state(config), Own()):
        assert witness.holds, f"{witness.name}: {witness.details}"


@pytest.mark.long
def test_padding_that_is_not_appended_row_by_row_is_seen(small, plain, monkeypatch):
    monkeypatch.setattr(relayout, "add_zeros", lambda x, _, larger: jnp.resize(x, larger))
    assert through(small, plain).endswith("restored in data 3, zero 1")


@pytest.mark.long
def test_a_leaf_that_restoring_loses_is_seen(small, plain, monkeypatch):
    real = relayout.lay_out_again

    def lost(setup, path, found, asked, layout):
        return jax.tree.map(lambda x: 0 * x, real(setup, path, found, asked, layout))

    monkeypatch.setattr("spmdtrain.checkpoints.checkpoints.lay_out_again", lost)
    assert "restored in data 3" in through(small, plain)


def test_a_schedule_free_weight_is_followed_where_the_rate_falls():
    config = ScheduleFreeAdamW(learning_rate=1e-2, weight_decay=0.1)
    random = np.random.default_rng(0)
    weight = random.standard_normal((3, 4)).astype(np.float32)
    rule = make_optimizer(config)("w", Parameter(weight.shape, ("embed", "ffn")))
    assert rule is not None
    state, x = rule.transformation.init(jnp.asarray(weight)), jnp.asarray(weight)
    followed = follow(config, weight.astype(np.float64), decays=True)
    update = jax.jit(rule.transformation.update)
    for rate in (1e-3, 1e-2, 2e-3, 1e-2, 1e-4):
        gradient = random.standard_normal(weight.shape).astype(np.float32)
        want = followed.moved(gradient.astype(np.float64), np.asarray(x, np.float64), rate)
        moved, state = update(jnp.asarray(gradient), state, x, learning_rate=jnp.float32(rate))
        np.testing.assert_allclose(-np.asarray(moved), want, rtol=1e-3, atol=1e-7)
        x = x - moved


def test_parts_that_the_config_names_replace_those_of_the_settings(small):
    named = shrink(load(ROOT / "examples" / "own_parts.toml")).config
    for part in ("optimizer", "learning_rate"):
        assert Own().replaces(part, named)
        assert not Own().replaces(part, small)


def test_a_run_in_parts_needs_no_launcher(small):
    kept = with_settings(small, ("checkpoint.memory_every=1", "checkpoint.memory_peer=true"))
    assert not with_settings(kept, SETTINGS).checkpoint.memory_every
