"""How kinds of layer use the tensor axis: the program against all combinations, and rules that the framework takes."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers import trained

from spmdtrain.cli import main
from spmdtrain.config import ConfigError, load
from spmdtrain.planner import assign, cost
from spmdtrain.planner.hardware import DEVICES
from spmdtrain.planner.job import Job, Layout, Shape
from spmdtrain.planner.stack import stack

OURS = stack("spmdtrain", "h100")
JOB = Job(Shape(8, 512, 8, 8, 64, 2048, 32768), 512, 64, 1, Layout(data=8, tensor=8), remat="full")
H100 = DEVICES["h100"]
SLOW = replace(H100, link_bandwidth=1e9)  # what passes between devices costs more than it saves
BIG = replace(JOB, shape=replace(JOB.shape, embed=8192, heads=64, kv_heads=64, head_dim=128, hidden=32768))
TINY = """
[model]
layers = 1
embed = 64
heads = 8
vocab = 256
[mesh]
tensor = 8
[train]
global_batch = 8
microbatch = 1
sequence_length = 64
"""


def every(job, device, by_rules):
    """(seconds, bytes more) of every combination: ways of three kinds, streams before and after attention."""
    at = lambda *what: assign.cost_of(*what, job, device, OURS)  # noqa: E731
    for first, second in product(assign.STREAMS, repeat=2):
        around = {"attention": (first, second), "mlp": (second, first), "vocabulary": (first, first)}
        for ways in product(assign.TAKES, repeat=3):
            if by_rules and (first != second or any((way == "tokens") != (first == "time") for way in ways)):
                continue
            seconds, more = np.sum(
                [at(kind, way, around[kind]) for kind, way in zip(around, ways, strict=True)], axis=0
            )
            yield seconds, more - assign.saved(first, job)


@pytest.mark.parametrize("by_rules", [True, False])
@pytest.mark.parametrize("device", [H100, SLOW])
@pytest.mark.parametrize("job", [JOB, BIG])
@pytest.mark.parametrize("drawn", [False, True])
def test_the_best_of_all_combinations_that_fit_is_found(job, device, by_rules, drawn, monkeypatch):
    if drawn:  # any costs at all
        rng, table = np.random.default_rng(0), {}
        cost_of = lambda *key: table.setdefault(key[:3], tuple(rng.uniform(1, 2, 2) * (1, 1e9)))  # noqa: E731
        monkeypatch.setattr(assign, "cost_of", cost_of)
    found = list(every(job, device, by_rules))
    assert len(found) == (8 + 8 + 1 if by_rules else 3**5)
    most, least = max(more for _, more in found), min(more for _, more in found)
    for share in (0.3, 0.6, 2.0) if drawn else (0.0, 0.1, 0.5, 2.0):
        room = share * most + 1
        fitted = replace(device, memory=(assign.ours(job).total + room) / assign.SAFE)
        fitting = [seconds for seconds, more in found if more <= room]
        best = assign.assign(job, fitted, OURS, by_rules=by_rules)
        assert bool(best) == bool(fitting)
        if best:
            assert best[0].seconds == pytest.approx(min(fitting))
            assert best[-1].more_bytes == pytest.approx(least, abs=1)  # the leanest is kept too


def test_each_way_is_best_somewhere():
    best = lambda *at: assign.assign(*at, OURS)[0]  # noqa: E731
    assert set(best(BIG, H100).ways.values()) == {"split"}
    assert best(BIG, H100).streams == ("embed", "embed")  # what waits for the backward is split
    assert best(replace(BIG, remat="none"), H100).rules == {"parameters": {}, "activations": {}}
    assert set(best(JOB, SLOW).ways.values()) == {"whole"}
    long = replace(JOB, sequence=32768, microbatch=8)  # many tokens, few weights
    assert set(best(long, H100).ways.values()) == {"tokens"}
    freely = assign.assign(replace(BIG, sequence=4096), H100, OURS, by_rules=False)[0]
    assert freely.seconds <= best(replace(BIG, sequence=4096), H100).seconds


def test_resharding_moves_what_it_must():
    quick = replace(H100, link_latency=0.0)
    seconds = {pair: assign.reshard(*pair, 8.0, 8, quick) for pair in product(("partial", *assign.STREAMS), repeat=2)}
    gathered = seconds["time", "whole"]
    assert gathered == seconds["embed", "whole"] == seconds["partial", "time"] > 0
    assert seconds["partial", "whole"] == 2 * gathered
    assert seconds["time", "embed"] == seconds["embed", "time"] == pytest.approx(gathered / 8)  # all to all
    assert seconds["whole", "time"] == seconds["whole", "whole"] == seconds["time", "time"] == 0


@pytest.mark.parametrize("remat", ["none", "full"])
def test_all_kinds_split_cost_what_the_estimate_says(remat):
    job = replace(JOB, remat=remat)
    price = cost.price(job, H100, OURS)
    outside = ("data_reduction", "optimizer", "outside_the_device", "stragglers")
    layers = sum(seconds for term, seconds in price.seconds.items() if term not in outside)
    split = [assign.cost_of(kind, "split", ("whole", "whole"), job, H100, OURS)[0] for kind in assign.AXIS]
    assert sum(split) == pytest.approx(layers)


def test_the_printed_rules_are_obeyed(tmp_path, capsys):
    path, slow = tmp_path / "tiny.toml", tmp_path / "slow.toml"
    path.write_text(TINY)
    slow.write_text('extends = "h100"\nlink_bandwidth = 1e6\n')
    command = ["plan", str(path), "--devices", "8", "--rules", "--hardware", str(slow)]
    assert main([*command, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)[0]
    assert set(best["ways"].values()) == {"whole"}
    assert main(command) == 0
    shown = capsys.readouterr().out
    path.write_text(TINY + shown[shown.index("[rules.") :])
    rules = load(str(path), []).rules
    assert {"parameters": rules.parameters, "activations": rules.activations} == {
        table: {axis: tuple(over) for axis, over in axes.items()} for table, axes in best["rules"].items()
    }
    assert main(["show", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["parameters"]
    assert not any("tensor" in axes for row in rows for axes in row["mesh_axes"])


@pytest.mark.parametrize("stream", ["embed", "time"])
def test_training_is_the_same_with_another_stream(stream):
    way = "tokens" if stream == "time" else "split"
    rules = assign.Assignment(dict.fromkeys(assign.AXIS, way), (stream, stream), 0.0, 0.0).rules
    settings = [
        f"rules.{table}.{axis}={','.join(over)}" for table, axes in rules.items() for axis, over in axes.items()
    ]
    mesh = "mesh.data=2", "mesh.tensor=2"
    assert trained(*mesh, *settings, steps=2)[0] == pytest.approx(trained(*mesh, steps=2)[0], rel=1e-5)


def test_one_device_along_tensor_is_refused():
    with pytest.raises(ConfigError, match="splits nothing"):
        assign.assign(replace(JOB, layout=Layout(data=8)), H100, OURS)
