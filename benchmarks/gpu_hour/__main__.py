"""The first hour on a machine with a GPU, in the order in which minutes count: `make gpu-hour`.

    python benchmarks/gpu_hour [--minutes 60] [--folder benchmarks/results/NAME] [--rehearse]

What fits in the minutes is run: GPU_HOUR=10 make gpu-hour does what fits in ten. Results lie in the
folder after each part, whatever ends the hour: README.md there is the page. Commit it, with its
hardware, versions and date. --rehearse runs every part with tiny sizes on the CPU, to see that the
hour will go through: its figures mean nothing.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hour import Part, run_parts
from parts_of_hour import PARTS

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "torch"),
)


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    query = "--query-gpu=name,memory.total,driver_version"
    return {
        "gpus": _said("nvidia-smi", query, "--format=csv,noheader"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES if _version(name)),
        "cores": os.cpu_count(),
    }


def _said(*command: str) -> str:
    """The lines that a command prints, joined; "none" where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return "; ".join(done.stdout.splitlines()) or "none"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=os.environ.get("GPU_HOUR") or "60")
    parser.add_argument("--folder", type=Path, help="of the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--parts", type=Path, help="other parts, a JSON file: for tests")
    chosen = parser.parse_args()
    parts = PARTS
    if chosen.parts:
        listed = json.loads(chosen.parts.read_text(encoding="utf-8"))
        parts = [Part(**each | {"command": tuple(each["command"])}) for each in listed]
    if chosen.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
        parts = [replace(each, command=each.rehearsal, least=0.0, most=30.0) for each in parts]
    # A part runs in a session of its own: a signal has to pass through the code that ends it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(3))
    found = machine() | ({"rehearsal": "on the CPU, no measurement"} if chosen.rehearse else {})
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = chosen.folder or ROOT / "benchmarks" / "results" / f"gpu-hour-{stamp}"
    rows = run_parts(parts, folder.resolve(), chosen.minutes, found)
    print(f"{folder / 'README.md'}: the page")
    sys.exit(any(row["status"].startswith("failed") for row in rows))


if __name__ == "__main__":
    main()
