"""A run that was measured as the anchor of an estimate: how much longer its steps took than predicted."""

import json
import statistics
from pathlib import Path

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.mesh import AXES
from spmdtrain.planner import report
from spmdtrain.planner.hardware import Hardware


def measured_run(directory: Path) -> tuple[RunConfig, dict[str, int], float]:
    """(config, mesh, median seconds of a step) of a run, without its first step since it last started."""
    try:
        saved = json.loads((directory / "config.json").read_text())
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
        starts = [(event["step"] + 1, event["mesh"]) for event in events if "mesh" in event]
        since, mesh = starts[-1] if starts else (0, dict.fromkeys(AXES, 1))
        mesh = {axis: int(mesh[axis]) for axis in AXES}
        steps = [float(line["step_seconds"]) for line in lines if "step_seconds" in line and line["step"] > since]
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot read a run in {directory}: {said}", fix="the directory of a finished run") from None
    config = from_resolved(saved)
    if not steps or not starts:
        raise ConfigError(f"{directory} holds no measured steps", fix="a run of a few steps")
    return config, mesh, statistics.median(steps)


def anchored(run: str, device: Hardware) -> float:
    """measured / predicted step time of a run that was made on this hardware: what to multiply predictions by."""
    config, mesh, seconds = measured_run(Path(run))
    return seconds / report.priced(config, mesh, device)[0].step
