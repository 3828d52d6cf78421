"""Two runs compared: what parted them is named first, rounding is told from a cause."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from fuzz import programs
from planted_pairs import Pair, Runs, change, fault, is_right, names_of

from spmdtrain.checkpoints.identity import flat
from spmdtrain.cli import main
from spmdtrain.config import CheckpointError, RunConfig, resolved
from spmdtrain.config.errors import DONE, UNEQUAL
from spmdtrain.lab.diff.causes import RunDifferences, causes
from spmdtrain.lab.diff.diff import diff
from spmdtrain.lab.diff.differences import DataDifference, Other
from spmdtrain.lab.diff.meaning import DECIDED, Changed, kind_of
from spmdtrain.lab.diff.parting import Parting
from spmdtrain.lab.diff.speed import speed_of
from spmdtrain.lab.replay.written import WrittenRun

LAYOUT = ("mesh.data=2", "mesh.tensor=2", "train.zero=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains pairs; what one has compiled serves the others."""
    with programs.shared():
        yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.long
@pytest.mark.parametrize(
    "pair",
    [
        Pair("gpt", (), "identical"),
        Pair("gpt", LAYOUT, "rounding", names_of(LAYOUT)),
        Pair("bfloat16", ("mesh.data=2",), "rounding", ("mesh.data",)),
        change("optimizer.weight_decay=0.11"),
        fault("machine"),
        replace(fault("layout"), settings=LAYOUT, first=names_of(LAYOUT)),
    ],
    ids=lambda pair: f"{pair.base} {pair.verdict} {pair.fault}",
)
def test_what_parted_two_runs_is_named_first(runs, pair):
    found = runs.compared(pair)
    assert is_right(pair, found), found
    json.dumps(found.document(), allow_nan=False)
    if pair.fault == "machine":
        assert found.parting.first == 10, "the weight was moved after step 9"
        assert (found.settings, found.program.same, found.data.step) == ([], True, None)


@pytest.mark.long
def test_the_command_says_it_in_words_and_by_its_exit_code(runs, capsys):
    a, b = (str(runs.of("gpt", each)) for each in ((), ("optimizer.beta2=0.951",)))
    assert main(["diff", a, a, "--no-replay"]) == DONE
    assert "none is needed: the runs are identical" in capsys.readouterr().out
    assert main(["diff", a, b, "--no-replay", "--json"]) == UNEQUAL
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["causes"][0]["name"]) == ("unclear", "optimizer.beta2")
    assert main(["diff", a, b, "--no-replay"]) == UNEQUAL
    said = capsys.readouterr().out
    assert "optimizer.beta2 0.95 -> 0.951" in said
    assert "rounding or not is unclear, by the files alone: nothing was replayed" in said
    assert said.splitlines()[-1].split() == ["cause", "optimizer.beta2"]


@pytest.mark.long
def test_what_no_step_reads_leaves_two_runs_identical(runs):
    found = diff(runs.of("gpt"), runs.of("gpt", ("log.every=7",)), devices=jax.devices()[:1])
    assert [(each.name, each.decides) for each in found.settings] == [("log.every", "none")]
    assert (found.verdict, found.causes) == ("identical", [])


@pytest.mark.long
def test_a_run_whose_input_is_slow_is_told_from_a_slow_machine(runs, tmp_path, capsys):
    a = runs.of("gpt")
    for name, waits, said in (("input", 0.3, "waits for its input"), ("machine", 0.0, "machine")):
        b = tmp_path / name
        shutil.copytree(a, b)
        lines = [json.loads(line) for line in (a / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["step_seconds"] += 0.3
            line["input_seconds"] += waits
        (b / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert main(["diff", str(a), str(b), "--no-replay"]) == DONE
        line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("speed"))
        assert "B" in line.split() and said in line


def run_of(seconds: float, waits: float, tokens: float = 256.0, *, noise: float = 0.05):
    """A run of 40 steps of about so many seconds."""
    draw = random.Random(int(1000 * seconds))
    figures = {
        step: {
            "step_seconds": seconds * (1 + noise * draw.random()),
            "input_seconds": waits,
            "tokens": tokens,
        }
        for step in range(1, 41)
    }
    return WrittenRun(Path("run"), figures, {}, [], [{"from_step": 0}])


@pytest.mark.parametrize(
    ("a", "b", "same", "held"),
    [
        (run_of(1.0, 0.0), run_of(1.05, 0.0), True, None),
        (run_of(1.0, 0.0, noise=2.0), run_of(1.3, 0.0, noise=2.0), True, None),
        (run_of(1.0, 0.0), run_of(1.4, 0.0), True, "machine"),
        (run_of(1.0, 0.0), run_of(1.4, 0.0), False, "program"),
        (run_of(1.0, 0.0), run_of(1.4, 0.35), False, "input"),
        (run_of(1.4, 0.35), run_of(1.0, 0.0), True, "input"),
        (run_of(1.0, 0.0), run_of(2.0, 0.0, 512.0), False, "size"),
    ],
)
def test_the_slower_run_is_held_up_by_what_grew(a, b, same, held):
    assert speed_of(a, b, same).held == held


def found_of(*names: str, code: tuple[str, ...] = (), data: int | None = None) -> RunDifferences:
    """Runs that differ in these settings and in this code."""
    settings = [Changed(name, 0, 1, kind_of(name)) for name in names]
    return RunDifferences(
        settings, [Other(each, "1", "2") for each in code], [], DataDifference(data, 9, None)
    )


EVERYTHING = ("optimizer.beta2", "mesh.tensor", "model.mlp", "optimizer.warmup", "data.shuffle")


@pytest.mark.parametrize(
    ("parting", "first"),
    [
        ({"beyond": 1, "in_figure": "tokens"}, "data.shuffle"),
        ({"beyond": 4, "in_figure": "loss", "rate": 3}, "optimizer.warmup"),
        ({"beyond": 1, "in_figure": "loss"}, "model.mlp"),
        ({"beyond": 3, "in_figure": "loss"}, "optimizer.beta2"),
    ],
)
def test_of_many_changes_that_comes_first_which_decides_what_was_other_first(parting, first):
    told = Parting(9, 9, "differ", first=1, **parting)
    for seed in range(5):
        names = random.Random(seed).sample(EVERYTHING, len(EVERYTHING))
        ranked = causes(found_of(*names, code=("jax",)), told, 1)
        assert ranked[0].name == first
        assert [each.name for each in ranked[-2:]] == ["mesh.tensor", "jax"]
        if first != "optimizer.beta2":
            assert ranked[3].name == "optimizer.beta2", "what is made last explains least"


@pytest.mark.core
def test_rounding_is_explained_by_layout_and_a_wrong_layout_by_itself():
    within = Parting(9, 9, "rounding", first=1)
    beyond = Parting(9, 9, "differ", first=1, beyond=1, in_figure="loss")
    assert causes(found_of("optimizer.beta2", "mesh.tensor"), within, 1)[0].name == "mesh.tensor"
    assert causes(found_of("mesh.tensor"), beyond, 1)[0].name == "mesh.tensor"
    assert causes(found_of(code=("sources of spmdtrain",)), beyond, 1)[0].of == "code"
    assert causes(found_of(), beyond, 1)[0].of == "machine"
    assert causes(found_of("mesh.tensor", data=4), beyond, 1)[0].of == "data"
    reset = found_of("optimizer.warmup", "optimizer.beta1", "optimizer.name", "model.mlp")
    ranked = causes(reset, replace(beyond, beyond=2, rate=1), 1)
    assert [each.name for each in ranked[:2]] == ["optimizer.name", "optimizer.warmup"]


def test_every_beginning_of_the_table_is_that_of_a_setting():
    names = flat(resolved(RunConfig())["config"])
    mesh_rules = {"rules.", "kernels."}
    for starts, _ in DECIDED:
        for start in set(starts) - mesh_rules:
            assert any(name.startswith(start) for name in names), start


def test_of_a_run_of_an_older_version_it_says_what_was_not_recorded(capsys):
    old = str(Path(__file__).parents[1] / "fixtures" / "run_of_0_1_0" / "run")
    assert main(["diff", old, old, "--no-replay"]) == DONE
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    unknown = [what for what, said in lines if said == "not recorded"]
    assert unknown == ["code", "devices", "data", "program"]


def test_two_runs_without_a_step_in_common_are_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(resolved(RunConfig())))
        (tmp_path / name / "events.jsonl").write_text("")
        (tmp_path / name / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="have taken no step in common"):
        diff(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointError, match="is not a run directory"):
        diff(tmp_path / "a", tmp_path / "nowhere")
