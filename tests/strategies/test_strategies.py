"""Strategies compared: each is the mesh that its name says, all train the same, bytes follow the
formulas.
"""

import json
import re
from dataclasses import replace

import pytest
from helpers import tiny
from shares import rest

from spmdtrain.cli import main
from spmdtrain.config import REFUSED, ConfigError
from spmdtrain.lab.strategies.layouts import (
    DEFAULT,
    STRATEGIES,
    Cluster,
    compared_run,
    laid_out,
    settings_of,
)
from spmdtrain.lab.strategies.predicted import predict
from spmdtrain.lab.strategies.side_by_side import (
    in_markdown,
    in_terminal,
    table_predicted,
    table_trained,
    values_trained,
)
from spmdtrain.lab.strategies.trained import judge, train_in_turns
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.estimate import estimate
from spmdtrain.planner.traffic import needed_traffic

SIXTEEN = Cluster(16, per_host=8)
SETTINGS = ("train.global_batch=16", "model.layers=6", "model.heads=4")


def changed(name: str, *settings: str) -> dict[str, str]:
    """What a strategy sets on two hosts of eight, but for axes of one device."""
    pairs = [each.split("=") for each in settings_of(name, tiny(*SETTINGS, *settings), SIXTEEN)]
    return {key: value for key, value in pairs if (key[:5], value) != ("mesh.", "1")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single", {"train.zero": "0"}),
        ("ddp", {"mesh.data": "16", "train.zero": "0"}),
        ("zero1", {"mesh.data": "16", "train.zero": "1"}),
        ("fsdp", {"mesh.fsdp": "16", "train.zero": "0"}),
        ("tensor", {"mesh.data": "4", "mesh.tensor": "4", "train.zero": "0"}),
        (
            "pipeline",
            {
                "mesh.pipeline": "2",
                "mesh.data": "8",
                "train.zero": "0",
                "pipeline.schedule": "1f1b",
                "pipeline.chunks": "1",
                "train.microbatch": "1",
            },
        ),
        ("configured", {}),
    ],
)
def test_a_strategy_is_the_mesh_that_its_name_says(name, expected):
    assert changed(name) == expected


def test_a_microbatch_is_at_most_that_of_the_run_and_divides_the_sequences_of_a_shard():
    assert changed("single", "train.microbatch=6")["train.microbatch"] == "4"
    assert changed("ddp", "train.microbatch=6")["train.microbatch"] == "1"
    assert changed("tensor", "train.microbatch=2")["train.microbatch"] == "2"


def test_a_strategy_without_a_mesh_here_says_why():
    config = tiny("model.layers=3", "model.heads=1")
    with pytest.raises(ConfigError, match="3 layers and the 16 devices"):
        settings_of("pipeline", config, SIXTEEN)
    with pytest.raises(ConfigError, match="only head of the keys and the 8 devices of a host"):
        settings_of("tensor", config, SIXTEEN)


def test_stages_are_left_out_and_islands_refused(tmp_path):
    staged = tiny("optimizer.rate_by_batch=none")
    train = staged.train.model_copy(update={"stages": ()})
    assert compared_run(staged).train == train
    islands = ["islands.count=2", "islands.index=0", f"islands.directory={tmp_path}"]
    with pytest.raises(ConfigError, match="islands are several"):
        compared_run(tiny(*islands, "train.steps=20"))


in_five_layouts = rest(
    "trains in five layouts; train/test_layouts.py holds each against one device"
)


@pytest.fixture(scope="module")
def trained():
    """All strategies but `single`, on eight devices."""
    return train_in_turns(tiny(), DEFAULT, rounds=1, steps=2)


@in_five_layouts
@pytest.mark.long
def test_all_strategies_train_the_same_samples_to_the_same_loss(trained):
    assert [each.name for each in trained if each.refused] == []
    assert [each.name for each in trained if not each.is_same] == []
    losses = [[figures["loss"] for figures in each.figures] for each in trained]
    assert len(losses[0]) == 4 and losses[0][0] != losses[0][-1]
    assert all(each == pytest.approx(losses[0], rel=1e-5) for each in losses)
    assert all(len(each.seconds) == 1 for each in trained)
    values = json.loads(json.dumps([values_trained(each) for each in trained], allow_nan=False))
    assert [each["losses"] for each in values] == losses
    assert in_markdown(table_trained(trained, "here")).count("within rounding") == 4


@in_five_layouts
@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp"])
def test_bytes_are_those_of_the_formula(trained, name):
    (found,) = (each for each in trained if each.name == name)
    config = laid_out(name, tiny(), Cluster(8, 8))
    needed = needed_traffic(workload_of(config, found.mesh))
    for axis, sent in needed.items():
        assert found.sent[axis] == pytest.approx(sent, rel=0.02)
    (ddp,) = (each for each in trained if each.name == "ddp")
    if name in ("zero1", "fsdp"):
        assert found.memory.argument_bytes < ddp.memory.argument_bytes / 2


@in_five_layouts
@pytest.mark.long
def test_one_that_trains_something_else_is_told_from_rounding(trained):
    first, other = (replace(each) for each in trained[:2])
    apart = [figures | {"loss": figures["loss"] * (1 + 1e-5)} for figures in other.figures]
    other.figures = apart
    limits = [
        {name: 1e-6 * figures[name] for name in ("loss", "grad_norm")} for figures in first.figures
    ]
    judge([first, other], limits)
    assert (first.is_same, other.is_same) == (True, False)
    assert other.limits == pytest.approx(10, rel=0.5)
    said = in_terminal(table_trained([first, other], "here")).splitlines()
    assert "the first" in said[2] and re.search(r"no: [\d.]+ x rounding error", said[3])


@pytest.mark.core
def test_predictions_are_those_of_estimate_and_one_that_does_not_divide_is_a_reason():
    config = tiny("train.global_batch=16", "model.kv_heads=4")
    found = {each.name: each.offer for each in predict(config, [*STRATEGIES], DEVICES["h100"], 16)}
    by_hand = estimate(tiny("mesh.fsdp=16"), 16, "h100")
    assert found["fsdp"].best.estimate.time.seconds == by_hand.time.seconds
    assert found["fsdp"].days > config.train.steps * by_hand.time.seconds / 86400
    assert found["single"].best.workload.mesh.devices == 1
    assert all(offer.best for offer in found.values())
    config = tiny("train.global_batch=24", "train.microbatch=2")
    (small,) = predict(config, ["ddp"], DEVICES["h100"], 16)
    assert "train.global_batch=24 is not divisible by data=16 = 16" in small.offer.refusal
    assert small.offer.refusal in in_terminal(table_predicted([small], "predicted"))


CONFIG = "configs/quickstart.toml"
PREDICT = ("--rounds", "0", "--hardware", "h100", "--devices", "4", "--set", "model.vocab=64")


def test_the_command_predicts_without_running_and_writes_the_table(tmp_path, capsys):
    page = tmp_path / "table.md"
    names = ("--strategies", "fsdp,ddp", "--write", str(page))
    assert main(["compare", CONFIG, *PREDICT, *names, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predicted"]
    assert [each["strategy"] for each in found] == ["fsdp", "ddp"]
    assert found[0]["layout"]["fsdp"] == found[1]["layout"]["data"] == 4
    assert found[0]["sent_bytes"]["fsdp"] > found[1]["sent_bytes"]["data"] > 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| fsdp", "| ddp"]


def test_a_strategy_that_cannot_run_is_a_line_and_if_none_can_the_command_is_refused(capsys):
    words = ("--strategies", "pipeline", "--set", "model.layers=3")
    assert main(["compare", CONFIG, *words]) == REFUSED
    said = capsys.readouterr().out
    assert "pipeline: no number divides both the 3 layers and the 8 devices" in said
    assert main(["compare", CONFIG, *words, "--json"]) == REFUSED
    (row,) = json.loads(capsys.readouterr().out)["here"]["rows"]
    assert row["strategy"] == "pipeline" and "3 layers" in row["problem"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--strategies", "ddp,fspd"), "did you mean fsdp"),
        (("--strategies", "ddp,ddp"), "ddp is named twice"),
        (("--hardware", "h100"), "--hardware and --devices go together"),
        (("--rounds", "0"), "nothing is to run"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    assert main(["compare", CONFIG, *words]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]
