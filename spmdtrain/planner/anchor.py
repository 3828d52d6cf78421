"""Estimates anchored on a measured run: `spmdtrain estimate --anchor RUN`.

An *anchor* is a run that was made on the hardware in question. The ratio of its measured step time
to its estimate corrects what the model gets wrong about this machine: other estimates are
multiplied by it.
"""

import statistics
from pathlib import Path

from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.run_files import RunFiles
from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.mesh import AXES
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.estimate import estimate_on_mesh


def anchor_scale(run: Path, hardware: Hardware) -> float:
    """Returns measured / estimated step time of a run that was made on this hardware."""
    config, sizes, seconds = measured_run(run)
    return seconds / estimate_on_mesh(config, sizes, hardware).time.seconds


def measured_run(run: Path) -> tuple[RunConfig, dict[str, int], float]:
    """Returns (config, mesh sizes, median seconds of a step) of a run directory.

    Steps before the last start, and the first step after it, which compiles, do not count. Raises
    ConfigError if the directory is unreadable or holds no measured steps.
    """
    try:
        files = RunFiles(run)
        saved, metrics, events = files.config, files.metrics, files.events
        starts = [(event["step"] + 1, event["mesh"]) for event in events if "mesh" in event]
        first_step, mesh = starts[-1] if starts else (0, dict.fromkeys(AXES, 1))
        sizes = {axis: int(mesh[axis]) for axis in AXES}
        steps = [
            float(line["step_seconds"])
            for line in metrics
            if "step_seconds" in line and line["step"] > first_step
        ]
    except (CheckpointError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"cannot read a run in {run}: {type(error).__name__}: {error}",
            fix="the directory of a finished run",
        ) from None
    config = from_resolved(saved)
    if not steps or not starts:
        raise ConfigError(f"{run} holds no measured steps", fix="a run of a few steps")
    return config, sizes, statistics.median(steps)
