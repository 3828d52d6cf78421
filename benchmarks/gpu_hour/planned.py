"""How far off is the predicted step: from the data sheet alone, then from what was calibrated here?

    python benchmarks/gpu_hour/planned.py FOLDER [--gpu NAME]

FOLDER holds train_gpt2.json, and hardware.toml where `spmdtrain calibrate` has run.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from trained import CONFIG, SETTINGS
from training import ROOT

from pallas_kernels.gpus import find
from pallas_kernels.tuning.table import gpu_models


def predicted(hardware: str) -> float:
    """Returns the seconds of a step that `spmdtrain estimate` predicts."""
    command = [sys.executable, "-m", "spmdtrain.cli", "estimate", CONFIG, "--json"]
    command += ["--hardware", hardware]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"estimate for {hardware} ended with code {done.returncode}")
    return json.loads(done.stdout)["step_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", help="its name on our command lines; default: the one here")
    chosen = parser.parse_args()
    measured_file = chosen.folder / "train_gpt2.json"
    calibrated = chosen.folder / "hardware.toml"
    if not measured_file.exists():
        raise SystemExit("no step was measured: train_gpt2 has not run")
    measured = json.loads(measured_file.read_text(encoding="utf-8"))["step_seconds"]
    here = find((gpu_models() or [""])[0])
    sheet = chosen.gpu or (here.name if here else None)
    sources = {"data sheet": sheet, "calibrated": str(calibrated) if calibrated.exists() else None}
    parts = [f"step {1e3 * measured:.2f} ms"]
    for name, hardware in sources.items():
        if hardware is None:
            parts.append(f"{name}: not known")
            continue
        error = predicted(hardware) / measured - 1
        parts.append(f"{name}: predicted {error:+.1%}")
    print("; ".join(parts))


if __name__ == "__main__":
    main()
