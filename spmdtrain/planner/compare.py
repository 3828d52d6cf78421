"""After a run: what was predicted, what was compiled and what was measured, side by side.

Reads the run directory alone, and writes RUN/predicted.json: the estimate, and the three figures of step time and
memory with the error of the prediction.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError, StorageError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner import report
from spmdtrain.planner.hardware import Hardware


def measured_run(directory: Path) -> tuple[RunConfig, dict[str, int], float]:
    """(config, mesh, median seconds of a step) of a run, without its first step since it last started."""
    try:
        config = from_resolved(json.loads((directory / "config.json").read_text()))
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a run in {directory}: {error}", fix="the directory of a finished run") from None
    starts = [event for event in events if "mesh" in event]
    since = starts[-1]["step"] + 1 if starts else 0
    steps = [line["step_seconds"] for line in lines if "step_seconds" in line and line["step"] > since]
    if not steps or not starts:
        raise ConfigError(f"{directory} holds no measured steps", fix="a run of a few steps")
    return config, starts[-1]["mesh"], statistics.median(steps)


def anchored(run: str, device: Hardware) -> float:
    """measured / predicted step time of a run that was made on this hardware: what to multiply predictions by."""
    config, mesh, seconds = measured_run(Path(run))
    return seconds / report.priced(config, mesh, device)[0].step


def compare(directory: Path, device: Hardware, peak_bytes: int | None = None) -> dict[str, Any]:
    """`peak_bytes`: what the allocator of a device measured, if it does. Writes RUN/predicted.json."""
    config, mesh, seconds = measured_run(directory)
    price, held = report.priced(config, mesh, device)
    try:
        xla = json.loads((directory / "compiled.json").read_text())["memory"]
    except (OSError, ValueError, KeyError):
        xla = None
    compiled = xla and xla["argument_bytes"] + xla["output_bytes"] - xla["alias_bytes"] + xla["temp_bytes"]
    found = {
        "estimate": report.describe(price, held),
        "step_seconds": {"predicted": price.step, "compiled": None, "measured": seconds},
        "memory_bytes": {"predicted": held.total, "compiled": compiled, "measured": peak_bytes},
    }
    for figures in (found["step_seconds"], found["memory_bytes"]):
        truth = figures["measured"] or figures["compiled"]
        figures["error"] = figures["predicted"] / truth - 1 if truth else None
    try:
        (directory / "predicted.json").write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {directory / 'predicted.json'}: {error.strerror}") from None
    return found


def show(found: dict[str, Any]) -> str:
    lines = [f"{'':<18}{'predicted':>12}{'compiled':>12}{'measured':>12}{'error':>9}"]
    for name, unit, scale in (("step_seconds", "s", 1.0), ("memory_bytes", "GB", 1e9)):
        figures = found[name]
        cells = [figures[column] for column in ("predicted", "compiled", "measured")]
        shown = "".join(f"{'-' if cell is None else f'{cell / scale:.4g}':>12}" for cell in cells)
        error = "-" if figures["error"] is None else f"{figures['error']:+.1%}"
        lines.append(f"{name.partition('_')[0] + ' (' + unit + ')':<18}{shown}{error:>9}")
    return "\n".join(lines)
