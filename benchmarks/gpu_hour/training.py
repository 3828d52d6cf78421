"""Runs of `spmdtrain train`, and what they wrote: for the parts of the hour that train."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def arguments(doc: str | None, config: str) -> argparse.ArgumentParser:
    """Returns the arguments of a part: the file of its figures, another config, other settings."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--config", default=config)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser


def command(config: str, run: Path, settings: list[str]) -> list[str]:
    """The command line of a run."""
    line = [sys.executable, "-m", "spmdtrain.cli", "train", config, "--run", str(run)]
    return line + [word for setting in settings for word in ("--set", setting)]


def train(config: str, run: Path, settings: list[str], simulated: int | None = None) -> None:
    """Trains to the end, on `simulated` devices of the CPU if any. SystemExit where that fails."""
    line = command(config, run, settings)
    line += ["--simulate-devices", str(simulated)] if simulated else []
    done = subprocess.run(line, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"train ended with code {done.returncode}")


def train_until(config: str, run: Path, settings: list[str], step: int) -> None:
    """Trains, and kills the run without a warning once it has written down this step."""
    child = subprocess.Popen(command(config, run, settings), cwd=ROOT)
    try:
        while child.poll() is None:
            if any(row["step"] >= step for row in metrics(run)):
                return
            time.sleep(0.02)
        raise SystemExit(f"the run ended with code {child.returncode} before step {step}")
    finally:
        child.kill()
        child.wait()


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole; none where there is no file."""
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(run: Path) -> dict[int, float]:
    """Step -> loss."""
    return {row["step"]: row["loss"] for row in metrics(run) if "loss" in row}
