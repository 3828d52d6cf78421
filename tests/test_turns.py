"""benchmarks/turns: variants of a step run alone, one after another, beside PyTorch's."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pallas_kernels.bias import triton

TURNS = Path(__file__).parents[1] / "benchmarks" / "turns"
RESULTS = TURNS.parent / "results" / "h200-2026-11-28"


@pytest.fixture
def turns(monkeypatch):
    """The program's names; nothing is run."""
    monkeypatch.syspath_prepend(str(TURNS))
    yield runpy.run_path(str(TURNS / "__main__.py"), run_name="turns")
    sys.modules.pop("variants", None)


def summary(results):
    program = (
        f"import json, runpy, sys; sys.path.insert(0, {str(TURNS)!r}); "
        f"main = runpy.run_path({str(TURNS / '__main__.py')!r}, run_name='turns'); "
        "print('\\n'.join(main['summary'](json.load(sys.stdin))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(results),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_last_lines_say_who_is_faster_and_what_follows():
    results = {
        "default": {"ms": 60.0, "peak_gb": 8.0},
        "torch": {"ms": 66.0, "peak_gb": 10.0},
        "loop": {"ms": 61.0, "peak_gb": 9.0},
        "llama": {"failed": "code 1"},
        "again": {"ms": 60.6, "peak_gb": 8.0},
    }
    lines = summary(results)
    assert "default: 1.100 of PyTorch's tokens/s, 0.80 of its memory" in lines
    assert "default is 1.00 ms faster than loop: write no layers out" in lines
    assert lines[-1].startswith("the card drifted by +1.0%")
    assert not any("llama" in line for line in lines)


def test_what_runs_alone_has_rules_too(turns):
    """The tiles are those that the kernels have: other rows of a variant are tiles to compare."""
    found = {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("loss", "biases", "matmuls")
    }
    shipped = f"{triton.PROGRAMS_OF_A_CORE} {triton.WARPS}"
    rows = {row for _, row, _, _, _ in turns["RULES_ALONE"]}
    assert {f"heads {triton.ROWS} {shipped}", f"gelu {triton.GELU_BLOCK} {shipped}"} < rows
    found["recurrence"] = {
        "Qwen3.5 27B, xla": 3.0,
        "Qwen3.5 27B, triton": 1.0,
        "Qwen3.5 27B, mosaic": 0.95,
        "Nemotron 3 Nano, triton": 1.0,
        "Nemotron 3 Nano, mosaic": "needs a Hopper GPU",
    }
    found["traced"] = {"idle_between_ms": 3.5}
    assert turns["summary"](found) == [
        "loss: triton/fourfold float32 is 3.58 ms faster than xla/fourfold float32: as it is",
        "loss: triton/fourfold bfloat16 is 1.78 ms faster than triton/fourfold float32: as it is",
        "biases: heads 16 4 8 is 0.07 ms faster than heads xla: as it is",
        "biases: gelu (16, 256) 4 8 is 0.15 ms faster than gelu xla: as it is",
        "recurrence: Qwen3.5 27B, triton is 2.00 ms faster than Qwen3.5 27B, xla: as it is",
        "recurrence: Qwen3.5 27B, mosaic is 0.05 ms faster than Qwen3.5 27B, triton: "
        "leave it to triton",
        "matmuls: 32768x768x768 reaches 527 TFLOP/s, the slowest: "
        "epilogues and layouts come before kernels",
        "traced: 3.50 ms between kernels: launches and CUDA graphs come first",
    ]


@pytest.mark.parametrize("seconds", [100, 75, 60])
def test_the_last_turn_keeps_its_seconds_when_time_is_short(seconds, turns, tmp_path):
    """Compiling takes 30 seconds, each turn 12: what does not fit is left out, and said."""
    names = ["default", "loop", "narrow", "cudnn", "again"]
    clock = SimpleNamespace(now=0.0)
    ended = []

    class Turn:
        def __init__(self, name, *_):
            self.name = name

        def is_ready(self, _):
            clock.now = max(clock.now, 30.0)
            return True

        def run(self, limit):
            assert limit >= 12
            clock.now += 12
            return {"ms": 1.0, "peak_gb": 1.0}

        def end(self):
            ended.append(self.name)

    run_all = turns["run_all"]
    time = SimpleNamespace(monotonic=lambda: clock.now)
    run_all.__globals__.update(Turn=Turn, time=time, VARIANTS=dict.fromkeys(names))
    results = run_all(names, tmp_path, seconds, dry=True)
    assert [*results] == names and "ms" in results["default"] and "ms" in results["again"]
    assert ended == {100: [], 75: ["narrow", "cudnn"], 60: ["loop", "narrow", "cudnn"]}[seconds]
    assert all(results[name] == {"failed": "no time was left for it"} for name in ended)
    assert clock.now <= seconds


@pytest.mark.long
def test_a_variant_that_fails_costs_itself_only(tmp_path):
    """Without PyTorch its step ends at once."""
    names = ["matmuls", "biases"]
    command = [sys.executable, str(TURNS), str(tmp_path), "--dry", "--only", *names, "torch"]
    hidden = tmp_path / "hidden"
    (hidden / "torch").mkdir(parents=True)
    (hidden / "torch" / "__init__.py").write_text("raise ImportError('hidden')")
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(hidden)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "torch it did not compile in time, or ended: see its log" in done.stdout
    assert "2 compiled" in done.stdout
    found = json.loads((tmp_path / "turns.json").read_text())
    assert set(found) == {*names, "torch"} and "failed" in found["torch"]
    assert "hidden" in (tmp_path / "torch.log").read_text()
