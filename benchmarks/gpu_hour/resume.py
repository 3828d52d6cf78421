"""Kills a run without a warning and resumes it: are all its losses those of a run that was left
alone?

    python benchmarks/gpu_hour/resume.py [--set KEY=VALUE]
"""

import argparse
import tempfile
from pathlib import Path

from training import losses, train, train_until

CONFIG = "configs/quickstart.toml"
STEPS = 60
SETTINGS = [
    f"train.steps={STEPS}",
    "checkpoint.every=10",
    "precision.compute=bfloat16",
    "data.packing=documents",
    "mesh.data=1",
    "mesh.fsdp=1",
    "mesh.tensor=1",
    "optimizer.schedule=constant",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kill-at", type=int, default=35, metavar="STEP")
    chosen = parser.parse_args()
    settings = SETTINGS + chosen.set
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder) / "alone", Path(folder) / "killed"
        train(CONFIG, alone, settings)
        train_until(CONFIG, killed, settings, chosen.kill_at)
        train(CONFIG, killed, settings)
        wanted, found = losses(alone), losses(killed)
    different = [step for step in wanted if wanted[step] != found.get(step)]
    if different or not wanted:
        first = different[0] if different else 0
        raise SystemExit(
            f"{len(different)} of {len(wanted)} losses differ, the first at step {first}: "
            f"{wanted.get(first)} alone, {found.get(first)} when killed"
        )
    print(f"the same {len(wanted)} losses, bit for bit, after a kill at step {chosen.kill_at}")


if __name__ == "__main__":
    main()
