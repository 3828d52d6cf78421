"""benchmarks/turns: variants of a step run alone, one after another, beside PyTorch's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TURNS = Path(__file__).parents[1] / "benchmarks" / "turns"


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
