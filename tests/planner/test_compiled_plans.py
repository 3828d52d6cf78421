"""Plans ranked again by what XLA says of them."""

import json
import subprocess

from workloads import gpt, workload_with

from spmdtrain.planner import compiled_plans, report
from spmdtrain.planner.compiled_plans import compile_plans
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.software import software
from spmdtrain.planner.plan import Plan, best_of_each_mesh, search

H100 = DEVICES["h100"]
MODEL = gpt(layers=24, embed=1024, heads=16, vocab=32768)
WORKLOAD = workload_with(MODEL, sequence_length=1024, global_batch=64)
GIGABYTE = 10**9


def compiled(held: int, seconds: float) -> str:
    """What `estimate --compile --json` prints of a step that holds so many bytes."""
    memory = {"argument_bytes": held, "temp_bytes": 0, "output_bytes": 5, "alias_bytes": 5}
    answer = {"step_seconds": seconds, "compiled": {"memory": memory}}
    return f"a warning\n{json.dumps(answer)}\n"


def answer_with(monkeypatch, answers: list[tuple[int, str, str]]) -> list[list[str]]:
    """Let each compile end with the next of these (code, output, errors); the list of commands."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, *answers[len(commands) - 1])

    monkeypatch.setattr(compiled_plans.subprocess, "run", run)
    return commands


def best_plans(count: int) -> list[Plan]:
    return best_of_each_mesh(search(WORKLOAD, 8, H100, software("spmdtrain", "h100")), count)


def test_what_does_not_compile_or_fit_comes_last_with_its_reason(monkeypatch):
    plans = best_plans(4)
    assert len(plans) == 4
    answers = [
        (1, "", "spmdtrain: one clear line\n"),
        (0, compiled(90 * GIGABYTE, 1.0), ""),
        (-6, "", 'loc("fused"): error: size mismatch\n*** Begin stack trace ***\n'),
        (0, compiled(9 * GIGABYTE, 2.0), ""),
    ]
    commands = answer_with(monkeypatch, answers)
    ranked = compile_plans(plans, ["model.toml", "--devices", "8"])
    assert [each.plan for each in ranked] == [plans[3], plans[1], plans[0], plans[2]]
    assert [each.held for each in ranked] == [9 * GIGABYTE, 90 * GIGABYTE, None, None]
    assert [each.fits for each in ranked] == [True, False, False, False]
    assert ranked[2].problem == "one clear line"
    assert ranked[3].problem == 'loc("fused"): error: size mismatch'
    for command, plan in zip(commands, plans, strict=True):
        assert command[3:7] == ["estimate", "model.toml", "--devices", "8"]
        assert set(plan.settings) < set(command)

    text = report.compiled_plans_text(ranked)
    assert text.splitlines()[1].lstrip().startswith("9.0 GB")
    assert text.splitlines()[-1].split(" --set ")[1:] == plans[3].settings[1:]
    assert "does not compile: one clear line" in text
    nothing = report.compiled_plans_text(ranked[1:])
    assert nothing.splitlines()[-1].startswith("none of them fits")


def test_the_time_predicted_of_the_compiled_step_decides(monkeypatch):
    plans = best_plans(3)
    seconds = (1.5, 0.5, 1.0)
    answers = [(0, compiled(GIGABYTE, each), "") for each in seconds]
    answer_with(monkeypatch, answers)
    ranked = compile_plans(plans, ["model.toml"])
    assert [each.plan for each in ranked] == [plans[1], plans[2], plans[0]]
    assert report.compiled_plans_text(ranked).splitlines()[1].split()[2:4] == ["0.5", "s"]
    assert report.compiled_plans_values(ranked)[0]["compiled_step_seconds"] == 0.5
