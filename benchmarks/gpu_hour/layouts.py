"""Trains the same steps on one GPU and on each layout of all of them: do the losses agree?

python benchmarks/gpu_hour/layouts.py [--set KEY=VALUE]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from training import losses, train

CONFIG = "configs/quickstart.toml"
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
TOLERANCE = 1e-4  # relative, in float32: sums have other orders
STEPS = 10
SETTINGS = [
    f"train.steps={STEPS}",
    "optimizer.warmup=0",
    "optimizer.schedule=constant",
    "eval.every=0",
    "checkpoint.every=0",
    "model.layers=8",
    "model.heads=8",
    "train.global_batch=64",
]


def count() -> int:
    """The devices here, counted in another process: this one must hold none."""
    code = "import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    devices = count()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:

        def trained(name: str, mesh: dict[str, int]) -> dict[int, float]:
            sizes = [f"mesh.{axis}={mesh.get(axis, 1)}" for axis in AXES]
            train(CONFIG, Path(folder) / name, SETTINGS + sizes + chosen.set)
            return losses(Path(folder) / name)

        wanted = trained("one", {})
        for axis in AXES if devices > 1 else ():
            found = trained(axis, {axis: devices})
            error = max(abs(found[step] / wanted[step] - 1) for step in wanted)
            print(f"{axis}={devices}: losses differ by {error:.1e} at most", flush=True)
            if not error <= TOLERANCE:
                wrong.append(axis)
    if wrong:
        raise SystemExit(f"another training than on one device: {', '.join(wrong)}")
    print(f"{devices} devices, {len(wanted)} steps: every layout trains as one device")


if __name__ == "__main__":
    main()
