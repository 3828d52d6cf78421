"""Which kinds the tensor axis splits: the program against all combinations, and rules that the framework takes."""

import json
from dataclasses import replace
from itertools import combinations

import pytest

from spmdtrain.cli import main
from spmdtrain.config import ConfigError
from spmdtrain.planner import assign, cost
from spmdtrain.planner.hardware import DEVICES
from spmdtrain.planner.job import Job, Layout, Shape
from spmdtrain.planner.stack import stack

OURS = stack("spmdtrain", "h100")
JOB = Job(Shape(8, 512, 8, 8, 64, 2048, 32768), 512, 64, 1, Layout(data=8, tensor=8))
H100 = DEVICES["h100"]
SLOW = replace(H100, link_bandwidth=1e9)  # sums over tensor cost more than they save
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


def every(job, device):
    for count in range(4):
        for split in combinations(assign.KINDS, count):
            seconds = more = 0.0
            for kind in assign.KINDS:
                divided, (whole, held) = assign.choices(kind, job, device, OURS)
                seconds, more = (seconds + divided, more) if kind in split else (seconds + whole, more + held)
            yield seconds, more, frozenset(split)


@pytest.mark.parametrize("device", [H100, SLOW])
@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
def test_the_best_of_all_combinations_that_fit_is_found(device, share):
    everything_whole = max(more for _, more, _ in every(JOB, device))
    room = share * everything_whole
    device = replace(device, memory=(assign.ours(JOB).total + room) / 0.8)
    seconds, more, split = min(each for each in every(JOB, device) if each[1] <= 1.000001 * room)
    best = assign.assign(JOB, device, OURS)[0]
    assert (best.seconds, best.more_bytes, best.split) == (pytest.approx(seconds), pytest.approx(more), split)


def test_slow_links_leave_layers_whole_and_little_memory_splits_them():
    big = replace(JOB, shape=replace(JOB.shape, embed=8192, heads=64, kv_heads=64, head_dim=128, hidden=32768))
    assert assign.assign(big, H100, OURS)[0].split == set(assign.KINDS)
    assert not assign.assign(JOB, SLOW, OURS)[0].split
    leanest = assign.assign(JOB, SLOW, OURS)[-1]
    assert leanest.split == set(assign.KINDS) and leanest.more_bytes == 0


def test_all_kinds_split_cost_what_the_estimate_says():
    price = cost.price(JOB, H100, OURS)
    outside = ("data_reduction", "optimizer", "outside_the_device", "stragglers")
    layers = sum(seconds for term, seconds in price.seconds.items() if term not in outside)
    assert sum(assign.choices(kind, JOB, H100, OURS)[0] for kind in assign.KINDS) == pytest.approx(layers)


def test_the_rules_are_obeyed(tmp_path, capsys):
    path, slow = tmp_path / "tiny.toml", tmp_path / "slow.toml"
    path.write_text(TINY)
    slow.write_text('extends = "h100"\nlink_bandwidth = 1e6\n')
    command = ["plan", str(path), "--devices", "8", "--rules", "--hardware", str(slow)]
    assert main([*command, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)[0]
    assert best["split"] == []
    assert main(command) == 0
    pasted = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert main(["show", str(path), "--json", *pasted]) == 0
    rows = json.loads(capsys.readouterr().out)["parameters"]
    assert not any("tensor" in axes for row in rows for axes in row["mesh_axes"])


def test_one_device_along_tensor_is_refused():
    with pytest.raises(ConfigError, match="splits nothing"):
        assign.assign(replace(JOB, layout=Layout(data=8)), H100, OURS)
