"""Kinds and numbers of GPUs compared: days and money follow from the step alone."""

import json
import math
from xml.etree import ElementTree

import pytest

from spmdtrain.cli import main
from spmdtrain.config import ConfigError, load
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.offers.offer_tables import offers_text, offers_values
from spmdtrain.planner.offers.offers import offers
from spmdtrain.planner.offers.picture import picture, rows_of_offers, rows_of_plans
from spmdtrain.planner.plan import plan

SETTINGS = (
    "model.vocab=50304",
    "train.global_batch=8",
    "mesh.data=-1",
    "train.microbatch=1",
    "train.sequence_length=1024",
)
KINDS = [DEVICES["h100"], DEVICES["a100-80"]]


@pytest.fixture(scope="module")
def config():
    return load("configs/gpt2_124m.toml", SETTINGS)


@pytest.fixture(scope="module")
def found(config):
    return offers(config, KINDS, [1, 4], 1e9, {"h100": 2.0, "a100-80": 0.01})


def test_cost_is_the_price_of_all_gpu_hours_of_all_steps(config, found):
    first = found[0]
    assert first.best.seconds == plan(config, first.devices, first.hardware)[0].seconds
    assert len({(offer.hardware.name, offer.devices) for offer in found}) == 4
    for offer in found:
        assert offer.steps == math.ceil(1e9 / (8 * 1024))
        lost = offer.best.estimate.checkpoints.lost_share
        seconds = offer.steps * offer.best.seconds / (1 - lost)
        assert offer.days == pytest.approx(seconds / 86400)
        assert offer.cost == pytest.approx(offer.price * offer.devices * seconds / 3600)


def test_the_cheapest_is_first_and_without_a_price_the_fastest(config, found):
    costs = [offer.cost for offer in found]
    assert costs == sorted(costs) and found[0].hardware.name == "a100-80"
    partly = offers(config, KINDS, [1, 4], 1e9, {"a100-80": 0.01})
    days = [offer.days for offer in partly]
    assert days == sorted(days) and partly[0].hardware.name == "h100"
    assert {offer.cost is None for offer in partly} == {True, False}
    assert "-" in offers_text(partly)


def test_tokens_are_those_of_the_steps_unless_given(config):
    (offer,) = offers(config, KINDS[:1], [1])
    assert offer.steps == config.train.steps


def test_epochs_are_no_number_of_tokens_before_the_data_are_read():
    epochs = load("configs/gpt2_124m.toml", [*SETTINGS, "train.epochs=3"])
    with pytest.raises(ConfigError, match="train.epochs=3 says how many tokens only once"):
        offers(epochs, KINDS[:1], [1])


@pytest.mark.seconds
def test_what_does_not_fit_is_last_and_says_so():
    large = load("configs/llama3_8b.toml", ["model.vocab=128256"])
    found = offers(large, KINDS[:1], [1, 16], 1e9)
    assert [offer.devices for offer in found] == [16, 1]
    assert found[1].best is None and "fit" in found[1].refusal
    assert offers_text(found).count("1 x h100: ") == 1
    assert offers_values(found)[1] == {
        "hardware": "h100",
        "devices": 1,
        "fits": False,
        "problem": found[1].refusal,
    }


def test_the_picture_has_each_offer_and_its_memory_to_scale(found):
    rows = rows_of_offers(found)
    drawn = ElementTree.fromstring(picture("1e9 tokens", rows))
    words = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    bars = [*drawn.iter("{http://www.w3.org/2000/svg}rect")]
    of_rank = [bar for bar in bars if bar.get("fill") == "#cfdff2"]
    assert len(of_rank) == len(found)
    for bar, offer in zip(of_rank, found, strict=True):
        share = float(bar.get("width")) / float(of_rank[-1].get("width"))
        assert share == pytest.approx(offer.cost / found[-1].cost, abs=2e-3)
        assert f"{offer.best.memory.total / 1e9:.1f} GB" in words
        y = bar.get("y")
        held = [each for each in bars if each.get("y") == y and each is not bar]
        wide = 260 * offer.best.memory.total / max(each.memory for each in KINDS)
        assert sum(float(each.get("width")) for each in held) == pytest.approx(wide, abs=0.5)
    assert picture("none", rows_of_plans([])).startswith("<svg")


def test_the_command_compares_and_draws(tmp_path, capsys):
    svg = tmp_path / "p.svg"
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    compare = ["plan", "configs/gpt2_124m.toml", *sets, "--devices", "1,2"]
    money = ["--tokens", "1e9", "--price", "h100=2", "--hardware", "h100"]
    assert main([*compare, *money, "--svg", str(svg), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["cost"] < second["cost"] and first["tokens"] == 1e9
    assert "2 x h100" in svg.read_text()
    wrong = {
        ("--price", "h200=2"): "--price names h200",
        ("--price", "h100"): "NAME=PRICE",
        ("--tokens", "nan"): "not a number above 0",
        ("--compile", "2"): "several devices compare",
    }
    for more, said in wrong.items():
        assert main([*compare, "--hardware", "h100", *more]) == ConfigError.exit_code
        assert said in capsys.readouterr().err
