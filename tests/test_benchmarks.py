"""The benchmarks run and compare like with like. Their figures are for people: nothing here is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = {
    "model.layers": 1,
    "model.embed": 16,
    "model.heads": 2,
    "train.global_batch": 2,
    "train.sequence_length": 8,
    "optimizer.learning_rate": 1e-2,
}


def test_the_loop_and_the_bare_step_of_the_overhead_benchmark_train_the_same(tmp_path):
    settings = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "overhead.json"
    command = [sys.executable, "benchmarks/overhead.py", "--rounds", "1", "--steps", "5", "--json", str(out), *settings]
    # Compiling is what takes the time here: half of it with optimisation off.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result == json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == 10  # one round and the one that warms up
    assert result["largest_loss_difference"] < 1e-5
    assert set(result["seconds"]) == {"bare, unrolled", "bare, scanned", "step", "loop"}
    assert "loop / bare" in done.stdout
