"""Kinds of layer on the tensor axis: dynamic programming against all combinations.

And: the framework takes the rules that are printed, and trains the same under them.
"""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers import trained
from workloads import gpt, workload_with

from spmdtrain.cli import main
from spmdtrain.config import ConfigError, load
from spmdtrain.planner import plan_rules
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.memory import SAFE_SHARE, step_memory
from spmdtrain.planner.cost.software import software
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import Group, MeshShape
from spmdtrain.planner.plan_rules import LOGICAL_AXIS, STREAMS, TAKES, Assignment, assign

OURS = software("spmdtrain", "h100")
H100 = DEVICES["h100"]
SLOW_LINKS = replace(H100, link_bandwidth=1e9)  # a collective costs more than splitting saves
WORKLOAD = workload_with(
    gpt(layers=8, embed=512, heads=8, vocab=32768),
    sequence_length=512,
    global_batch=64,
    microbatch=1,
    mesh=MeshShape(data=8, tensor=8),
    remat="full",
)
LARGE = WORKLOAD.with_settings(model={"embed": 8192, "heads": 64})
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


def all_combinations(workload, hardware, by_rules):
    """(seconds, bytes more) of every way of each kind, with every two streams."""
    for first, second in product(STREAMS, repeat=2):
        around = {
            "attention": (first, second),
            "mlp": (second, first),
            "vocabulary": (first, first),
        }
        for ways in product(TAKES, repeat=3):
            one_stream = first == second
            time_for_all = all((way == "tokens") == (first == "time") for way in ways)
            if by_rules and not (one_stream and time_for_all):
                continue
            costs = [
                plan_rules.cost_of(kind, way, around[kind], workload, hardware, OURS)
                for kind, way in zip(around, ways, strict=True)
            ]
            seconds, more_bytes = np.sum(costs, axis=0)
            yield seconds, more_bytes - plan_rules.saved_bytes(first, workload)


@pytest.fixture(params=[False, True], ids=["formulas", "drawn"])
def drawn_costs(request, monkeypatch) -> bool:
    """Whether costs are drawn at random: the program must be right for any."""
    if request.param:
        generator = np.random.default_rng(0)
        costs = {}

        def cost_of(kind, way, around, *_):
            drawn = tuple(generator.uniform(1, 2, 2) * (1, 1e9))
            return costs.setdefault((kind, way, around), drawn)

        monkeypatch.setattr(plan_rules, "cost_of", cost_of)
    return request.param


@pytest.mark.parametrize("by_rules", [True, False])
@pytest.mark.parametrize("hardware", [H100, SLOW_LINKS])
@pytest.mark.parametrize("workload", [WORKLOAD, LARGE])
def test_the_best_of_all_combinations_that_fit_is_found(workload, hardware, by_rules, drawn_costs):
    found = list(all_combinations(workload, hardware, by_rules))
    assert len(found) == (8 + 8 + 1 if by_rules else 3**5)
    most = max(more for _, more in found)
    least = min(more for _, more in found)
    for share in (0.3, 0.6, 2.0) if drawn_costs else (0.0, 0.1, 0.5, 2.0):
        room = share * most + 1
        total = step_memory(workload).total + room
        fitted = replace(hardware, memory=total / SAFE_SHARE)
        fitting = [seconds for seconds, more in found if more <= room]
        best = assign(workload, fitted, OURS, by_rules=by_rules)
        assert bool(best) == bool(fitting)
        if best:
            assert best[0].seconds == pytest.approx(min(fitting))
            assert best[-1].more_bytes == pytest.approx(least, abs=1)  # the leanest is kept too


def test_large_matrices_are_split_best():
    best = assign(LARGE, H100, OURS)[0]
    assert set(best.ways.values()) == {"split"}
    assert best.streams == ("embed", "embed")  # splits what is kept for the backward
    nothing_kept = assign(replace(LARGE, remat="none"), H100, OURS)[0]
    assert nothing_kept.rules == {"parameters": {}, "activations": {}}


def test_slow_links_keep_everything_whole():
    best = assign(WORKLOAD, SLOW_LINKS, OURS)[0]
    assert set(best.ways.values()) == {"whole"}


def test_many_tokens_and_few_weights_split_the_tokens():
    many_tokens = replace(WORKLOAD.with_settings(train={"sequence_length": 32768}), microbatch=8)
    best = assign(many_tokens, H100, OURS)[0]
    assert set(best.ways.values()) == {"tokens"}


def test_a_stream_that_may_change_is_no_slower():
    workload = LARGE.with_settings(train={"sequence_length": 4096})
    freely = assign(workload, H100, OURS, by_rules=False)[0]
    assert freely.seconds <= assign(workload, H100, OURS)[0].seconds


def test_resharding_moves_what_it_must():
    no_latency = replace(H100, link_latency=0.0)
    seconds = {
        (source, target): plan_rules.reshard_seconds(source, target, 8.0, Group(8, 1), no_latency)
        for source, target in product(("partial", *STREAMS), repeat=2)
    }
    gathered = seconds["time", "whole"]
    assert gathered == seconds["embed", "whole"] == seconds["partial", "time"] > 0
    assert seconds["partial", "whole"] == 2 * gathered
    all_to_all = pytest.approx(gathered / 8)
    assert seconds["time", "embed"] == seconds["embed", "time"] == all_to_all
    assert seconds["whole", "time"] == seconds["whole", "whole"] == seconds["time", "time"] == 0


@pytest.mark.parametrize("remat", ["none", "full"])
def test_all_kinds_split_cost_what_the_estimate_says(remat):
    workload = replace(WORKLOAD, remat=remat)
    not_of_a_kind = ("data_reduction", "optimizer", "outside_the_device", "stragglers")
    terms = step_time(workload, H100, OURS).terms
    expected = sum(seconds for term, seconds in terms.items() if term not in not_of_a_kind)
    around = ("whole", "whole")
    costs = [
        plan_rules.cost_of(kind, "split", around, workload, H100, OURS) for kind in LOGICAL_AXIS
    ]
    assert sum(seconds for seconds, _ in costs) == pytest.approx(expected)


@pytest.mark.seconds
def test_the_printed_rules_are_obeyed(tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    slow = tmp_path / "slow.toml"
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
        table: {axis: tuple(over) for axis, over in axes.items()}
        for table, axes in best["rules"].items()
    }

    assert main(["show", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["parameters"]
    assert not any("tensor" in axes for row in rows for axes in row["mesh_axes"])


@pytest.mark.parametrize("stream", ["embed", "time"])
@pytest.mark.seconds
def test_training_is_the_same_with_another_stream(stream):
    way = "tokens" if stream == "time" else "split"
    assignment = Assignment(dict.fromkeys(LOGICAL_AXIS, way), (stream, stream), 0.0, 0.0)
    settings = [
        f"rules.{table}.{axis}={','.join(over)}"
        for table, axes in assignment.rules.items()
        for axis, over in axes.items()
    ]
    mesh = ("mesh.data=2", "mesh.tensor=2")
    with_default_rules = trained(*mesh, steps=2)[0]
    assert trained(*mesh, *settings, steps=2)[0] == pytest.approx(with_default_rules, rel=1e-5)


def test_one_device_along_tensor_is_refused():
    with pytest.raises(ConfigError, match="splits nothing"):
        assign(replace(WORKLOAD, mesh=MeshShape(data=8)), H100, OURS)
