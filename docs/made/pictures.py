"""Draws the pictures of the pages with the project's own commands.

They are committed, because a code host and an editor show a page without a build.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMITTED = {
    "mesh.svg": "show configs/quickstart.toml --simulate-devices 8",
    "pipeline.svg": "schedule --kind 1f1b --stages 4 --microbatches 6",
    "interleaved.svg": "schedule --kind interleaved --stages 4 --microbatches 8 --chunks 2",
    "zero_bubble.svg": "schedule --kind zero_bubble --stages 4 --microbatches 8",
}
LOSS = "loss.svg"
LOSS_STEPS = 120
LOSS_RUN = (
    "train configs/quickstart.toml --simulate-devices 1 "
    "--set mesh.data=1 --set mesh.fsdp=1 --set mesh.tensor=1 "
    f"--set train.steps={LOSS_STEPS} --set eval.every=0 --set checkpoint.every=0"
)

WIDTH = 640
HEIGHT = 260
LEFT = 48
TOP = 24
BOTTOM = 40


def drawn(command: str) -> str:
    """The picture that `spmdtrain COMMAND --svg FILE` writes, run in the root of the project."""
    from spmdtrain.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        file = Path(folder) / "picture.svg"
        with contextlib.redirect_stdout(io.StringIO()):
            code = main([*command.split(), "--svg", str(file)])
        if code:
            raise RuntimeError(f"spmdtrain {command} --svg FILE ended with exit code {code}")
        return file.read_text()


def losses() -> list[float]:
    """The loss of each step of a short run of the quickstart on one device, from its
    metrics.jsonl.
    """
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "-m", "spmdtrain.cli", *LOSS_RUN.split(), "--run", run]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ)
        lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def loss_curve(values: Sequence[float]) -> str:
    """A line chart of loss over steps, as SVG."""
    highest = int(max(values)) + 1
    lowest = int(min(values))
    plot_width = WIDTH - LEFT - 16
    plot_height = HEIGHT - TOP - BOTTOM

    def x_of(step: int) -> float:
        return LEFT + plot_width * (step - 1) / max(1, len(values) - 1)

    def y_of(loss: float) -> float:
        return TOP + plot_height * (highest - loss) / (highest - lowest)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="11" '
        'fill="#444444">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for loss in range(lowest, highest + 1):
        y = y_of(loss)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, len(values) + 1, 20):
        middle = x_of(max(step, 1))
        parts.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{max(step, 1)}</text>"
        )
    points = " ".join(f"{x_of(step):.1f},{y_of(loss):.1f}" for step, loss in enumerate(values, 1))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#306da6" stroke-width="1.5"/>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    parts.append(f'<text x="{LEFT}" y="14">training loss</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
