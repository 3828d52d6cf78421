"""Goes back to a step that the user chose, and sets the checkpoints of later steps aside."""

from pathlib import Path

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.newest import LoadedState, newest_good
from spmdtrain.checkpoints.restore import read_step
from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.run_files import QUARANTINE, steps_in
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.train.state import TrainState


def check_chosen(run: Path, step: int, config: RunConfig, fresh: bool) -> None:
    """Refuses a step to which the run cannot go back. Reads directory names only."""
    if fresh:
        what = f"--step {step} goes back in a run, but --fresh starts a new one"
        raise ConfigError(what, fix="one of them at a time")
    steps = steps_in(run)
    if step not in steps:
        listed = ", ".join(map(str, steps))
        fix = f"--step {steps[-1]}" if steps else "training first, without --step"
        raise CheckpointError(
            f"{run} holds no checkpoint of step {step}", found=listed or "none", fix=fix
        )
    if step >= config.train.steps:
        raise ConfigError(
            f"after step {step} there is nothing to train",
            asked=f"train.steps={config.train.steps}",
            fix=f"--set train.steps={2 * step}",
        )


def chosen_or_newest(
    checkpoints: Checkpoints, run: Path, step: int | None, abstract: TrainState
) -> LoadedState | None:
    """Returns the checkpoint to resume from: that of `step`, or the newest intact one.

    Raises DamagedError if that of `step` is damaged.
    """
    if step is None:
        return newest_good(checkpoints, abstract)
    _, (state, meta) = read_step(
        checkpoints, run, step, lambda at: checkpoints.restore(at, abstract)
    )
    return LoadedState(step, state, meta)


def set_aside_later(checkpoints: Checkpoints, step: int, reporter: Reporter) -> None:
    """Moves the checkpoints of later steps aside: the run takes those steps again."""
    later = [saved for saved in checkpoints.steps() if saved > step]
    if not later:
        return
    checkpoints.quarantine(later)
    listed = ", ".join(map(str, later))
    line = f"went back to step {step}: {listed} are now in checkpoints/{QUARANTINE}"
    reporter.event("went_back", step, line, set_aside=later)
