"""Returns a run to an older checkpoint: from before its bad steps, or the newest intact one.

The loop only knows `Detour`, of which going back is one.
"""

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.files.quarantine import set_aside
from spmdtrain.checkpoints.leaves.stored_items import starting_afresh
from spmdtrain.checkpoints.newest import LoadedState, newest_good
from spmdtrain.config.errors import StorageError
from spmdtrain.config.run_files import EXPORTS, QUARANTINE
from spmdtrain.processes import pulse
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.saves import Saves
from spmdtrain.train.state import TrainState

MOST_RETURNS = 3  # to the same checkpoint; after that, the samples are not the cause


class Detour(Exception):
    """A request to leave the steps in flight, and to continue the run from another state."""

    def destination(self, saves: Saves) -> tuple[TrainState, int, int]:
        """Returns the state, step and global sample index from which the run continues.

        `saves` are those up to the detour. All processes call it.
        """
        raise NotImplementedError


class GoBack(Detour):
    """A request to go back to a checkpoint from before `first`, the first consecutive bad step.

    `step` is the last one. The text says what is wrong with it.
    """

    def __init__(self, what: str, first: int, step: int):
        super().__init__(what)
        self.first = first
        self.step = step

    def destination(self, saves: Saves) -> tuple[TrainState, int, int]:
        """Sets checkpoints and exports of the bad steps aside.

        Raises DivergedError if no older checkpoint exists, or if the run has returned to the same
        one too often.
        """
        return _go_back(self, saves)


def _go_back(bad: GoBack, saves: Saves) -> tuple[TrainState, int, int]:
    reporter = saves.reporter
    pulse.tell(pulse.RESTORE, bad.step)
    saves.finish()
    bad_steps = saves.bad_steps
    checkpoint = newest_good(saves.checkpoints, saves.setup.state, before=bad.first)
    if checkpoint is None:
        raise saves.diverged(bad.step, f"{bad}, and no checkpoint is older")
    if bad_steps.returned_to == checkpoint.step and bad_steps.returns >= MOST_RETURNS:
        back = f"the run has gone back to step {checkpoint.step} {bad_steps.returns} times"
        raise saves.diverged(bad.step, f"{bad}, and {back}")
    set_aside_damaged(saves.checkpoints, checkpoint, reporter)
    saves.checkpoints.quarantine([at for at in saves.checkpoints.steps() if at > checkpoint.step])
    set_aside_exports(checkpoint.step, reporter)

    first = checkpoint.meta["sample"]
    last = saves.samples(bad.step)[1]
    bad_steps.go_back(checkpoint.step, first, last)
    saves.early_stop.go_back(checkpoint.meta)
    pulse.tell(pulse.UNDONE, checkpoint.step)
    # The sinks are told while they still hold the bad steps.
    reporter.event(
        "rolled_back",
        bad.step,
        f"{bad}: back to step {checkpoint.step}, and on without the samples {first} to {last}",
        to_step=checkpoint.step,
        why=str(bad),
        samples=[first, last],
        seconds=pulse.phase().seconds,
    )
    reporter.go_back(checkpoint.step)
    return checkpoint.state, checkpoint.step, last + 1


def set_aside_damaged(
    checkpoints: Checkpoints, checkpoint: LoadedState, reporter: Reporter
) -> None:
    """Moves the damaged checkpoints aside, and says what is wrong with each."""
    checkpoints.quarantine(checkpoint.damaged)
    for step, error in checkpoint.damaged.items():
        line = f"{error.what}; it is now in checkpoints/{QUARANTINE}"
        reporter.event("quarantined", step, line, why=str(error))
    for item in starting_afresh(checkpoint.state, checkpoint.meta):
        reporter.say(
            f"{item} of checkpoint {checkpoint.step} does not fit, and starts from scratch"
        )


def set_aside_exports(after: int, reporter: Reporter) -> None:
    """Moves the exports of steps later than `after` into RUN/exports/quarantine, and prints a line.

    Process 0 moves them. Raises StorageError if it cannot.
    """
    exports = reporter.directory / EXPORTS
    if jax.process_index() or not exports.is_dir():
        return
    abandoned = sorted(
        int(folder.name)
        for folder in exports.iterdir()
        if folder.name.isdecimal() and int(folder.name) > after
    )
    if not abandoned:
        return
    try:
        for step in abandoned:
            set_aside(exports / str(step))
    except OSError as error:
        raise StorageError(f"cannot move {exports}: {error.strerror}") from None
    listed = ", ".join(map(str, abandoned))
    reporter.say(f"exports of the abandoned steps {listed} are now in {EXPORTS}/{QUARANTINE}")
