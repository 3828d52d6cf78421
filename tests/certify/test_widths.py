"""With muP a model learns at the same pace in every width, and the coordinate check sees where not.

The base is as wide as the vocabulary allows: what single rows of a table add to the logits of a
random direction falls with the root of vocabulary / width, in every parametrization.
"""

import json
from functools import cache
from typing import Any

import jax
import pytest
from helpers import tiny

from spmdtrain.cli import main
from spmdtrain.config import REFUSED, ConfigError, RunConfig
from spmdtrain.config.schema import AdamW, Lion, Muon, TransformerConfig
from spmdtrain.lab.certify.shrink import shrink
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.widths import (
    BOUND,
    CoordinateCheck,
    after_steps,
    at_width,
    coordinate_check,
)
from spmdtrain.models.abstract import Parameter
from spmdtrain.train.shard import shard
from spmdtrain.train.updates import shipped_optimizers
from spmdtrain.train.updates.parameter_kinds import kind_of, width_rate

BASE, WIDEST = 32, 128
SETTINGS = (
    *("model.layers=1", "model.head_dim=8", "model.vocab=16", "model.tied=false"),
    "optimizer.learning_rate=1e-2",
)
# Every weight moves by the rate in each step of Lion.
RATES = {"adamw": "1e-2", "lion": "3e-3", "muon": "1e-2"}
MUP = f"model.mup_base={BASE}"
STEPS = 8


def checked(config: RunConfig, *widths: int) -> CoordinateCheck:
    return coordinate_check(config, widths, STEPS, Own(), jax.devices()[:1])


@cache
def checked_with_mup(optimizer: str) -> CoordinateCheck:
    rate = f"optimizer.learning_rate={RATES[optimizer]}"
    config = tiny(*SETTINGS, MUP, f"optimizer.name={optimizer}", rate)
    between = (2 * BASE,) if optimizer == "adamw" else ()
    return checked(config, BASE, *between, WIDEST)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", RATES)
def test_the_logits_change_alike_in_every_width(optimizer):
    found = checked_with_mup(optimizer)
    assert found.is_good, [each.change for each in found.widths]
    assert {"hidden", "table", "vector"} == found.spread_by_kind.keys()


@pytest.mark.long
def test_without_mup_the_command_refuses_widths_on_any_mesh(capsys):
    settings = (*SETTINGS, "model.embed=32", "model.heads=4", "train.sequence_length=16")
    settings += ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=none")
    settings += ("train.global_batch=16", "data.corpus=synthetic")
    arguments = [part for each in settings for part in ("--set", each)]
    code = main(
        ["coordcheck", "configs/quickstart.toml", "--widths", "32,128", "--json", *arguments]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == REFUSED
    assert found["spread"] > 1.5 > BOUND
    assert not found["good"]


def rate_of_all(*_: Any) -> float:
    return 1.0


PLANTED = {
    "the rate of hidden matrices": (shipped_optimizers, "width_rate", rate_of_all),
    "the multiplier of the logits": (
        *(TransformerConfig, "logit_factor"),
        property(lambda model: model.logit_scale),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_multiplier_is_found(planted, monkeypatch):
    good = checked_with_mup("adamw")
    monkeypatch.setattr(*PLANTED[planted])
    config = at_width(tiny(*SETTINGS, MUP), WIDEST, STEPS)
    wrong = after_steps(config, Own(), jax.devices()[:1])
    # In the base every multiplier is 1: what is planted changes nothing there.
    found = CoordinateCheck((good.widths[0], wrong))
    assert not found.is_good, found


KINDS = {
    ("embed", "ffn"): "hidden",
    ("embed", "kv_heads", None, "head_dim"): "hidden",
    ("kv_heads", None, "head_dim", "embed"): "hidden",
    ("layer", "experts", "ffn", "embed"): "hidden",
    ("embed", None): "readout",
    ("layer", None, "embed"): "input",
    ("vocab", "embed"): "table",
    ("norm",): "vector",
}


@pytest.mark.parametrize("axes", KINDS, ids=str)
def test_logical_axes_tell_the_kind_of_a_parameter(axes):
    parameter = Parameter((8,) * len(axes), axes)
    assert kind_of("blocks.weight", parameter) == KINDS[axes]


def test_rates_fall_with_the_width_as_the_kind_asks():
    def rates(axes: tuple) -> list[float]:
        parameter = Parameter((8,) * len(axes), axes)
        return [width_rate(each, "w", parameter, 4) for each in (AdamW(), Lion(), Muon())]

    assert rates(("embed", "ffn")) == [1 / 4, 1 / 4, 1 / 2]
    assert rates(("embed", None)) == [1 / 4] * 3
    assert rates(("vocab", "embed")) == rates(("norm",)) == rates((None, "embed")) == [1.0] * 3


def test_scores_fall_with_head_dim_only_where_it_grows():
    grown = tiny("model.embed=128", "model.heads=4", MUP).model
    assert grown.score_factor == 8**0.5 / 32
    assert tiny("model.embed=128", "model.head_dim=8", MUP).model.score_factor is None
    assert tiny(MUP).model.score_factor is None


def test_decay_of_a_step_is_the_same_in_every_width():
    setup = shard(tiny("model.embed=64", MUP, *SETTINGS), devices=jax.devices()[:1])
    path = "blocks.layer.mlp.up_ef"
    rule = setup.update_rules[path]
    ones = jax.numpy.ones(setup.model.parameters[path].shape[1:])
    update, _ = rule.transformation.update(0 * ones, rule.transformation.init(ones), ones)
    assert rule.rate == 0.5
    assert jax.numpy.allclose(rule.rate * update, setup.config.optimizer.weight_decay)


def test_the_other_widths_keep_what_the_settings_keep():
    config = at_width(tiny("model.head_dim=8", "model.kv_heads=2", "model.ffn=96"), 64, STEPS)
    model = config.model
    assert (model.heads, model.kv_heads, model.head_dim, model.ffn) == (8, 4, 8, 192)
    assert at_width(tiny(), 64, STEPS).model.head_dim == 16
    with pytest.raises(ConfigError, match=r"model.heads=4 is not whole .* try other --widths"):
        at_width(tiny("model.head_dim=8"), 36, STEPS)


def test_a_run_made_small_keeps_its_width_factor():
    small = shrink(tiny("model.embed=256", "model.mup_base=64", "model.head_dim=64")).config.model
    assert small.width_factor == 4
    assert small.head_dim


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "sgd", "schedule_free_adamw"])
def test_an_optimizer_without_rates_for_widths_is_refused(optimizer):
    with pytest.raises(ConfigError, match=f"knows no rates of optimizer.name='{optimizer}'"):
        tiny(MUP, f"optimizer.name={optimizer}")


def test_what_chooses_its_own_rates_or_says_no_axes_is_refused():
    with pytest.raises(ConfigError, match="both choose rates"):
        shard(tiny(MUP), devices=jax.devices()[:1], optimizer=lambda *_: None)
    with pytest.raises(ConfigError, match="no dim of w has a logical axis"):
        kind_of("w", Parameter((8, 8), (None, None)))


def test_fewer_than_two_widths_are_refused():
    with pytest.raises(ConfigError, match="fewer than two; try --widths"):
        checked(tiny(), BASE)
