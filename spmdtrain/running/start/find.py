"""Finds the checkpoint from which a run resumes, with remarks about it."""

from collections.abc import Sequence

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import check_identity
from spmdtrain.checkpoints.newest import Found
from spmdtrain.processes import pulse
from spmdtrain.running.report import stages
from spmdtrain.running.start.chosen_step import chosen_or_newest
from spmdtrain.running.start.other_run import naming_settings, recorded
from spmdtrain.running.start.prepare import Prepared
from spmdtrain.train.setup import Setup


def find(
    prepared: Prepared, setup: Setup, checkpoints: Checkpoints
) -> tuple[Found | None, Sequence[str]]:
    """Returns the checkpoint of the chosen step, or the newest intact one, with remarks.

    The checkpoint is None if there is none. Raises CheckpointError if it belongs to another run.
    """
    pulse.tell(pulse.RESTORE)
    stages.enter("looking for a checkpoint")
    directory = prepared.directory
    with naming_settings(directory, setup, prepared.data, prepared.seams):
        found = chosen_or_newest(checkpoints, directory, prepared.step, setup.state)
    if found is None:
        return None, []
    where = f"step {found.step} of {directory}"
    return found, check_identity(found.meta, setup, prepared.data, where, recorded(directory))
