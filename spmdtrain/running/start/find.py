"""Finds the checkpoint from which a run resumes, with remarks about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import check_identity
from spmdtrain.checkpoints.newest import Found
from spmdtrain.checkpoints.snapshots.snapshots import Snapshots
from spmdtrain.processes import pulse
from spmdtrain.running.report import stages
from spmdtrain.running.start.chosen_step import chosen_or_newest
from spmdtrain.running.start.open_snapshots import open_snapshots
from spmdtrain.running.start.other_run import naming_settings, recorded
from spmdtrain.running.start.prepare import Prepared
from spmdtrain.train.setup import Setup


@dataclass(frozen=True)
class Finding:
    """The checkpoint or snapshot that a run continues from, if there is one, with `remarks`.

    `snapshots` are those of the run, if the settings ask for any.
    """

    found: Found | None
    remarks: Sequence[str]
    snapshots: Snapshots | None


def find(prepared: Prepared, setup: Setup, checkpoints: Checkpoints) -> Finding:
    """Returns the checkpoint of the chosen step, or the newest intact one.

    A snapshot in the launcher's memory is as good as a checkpoint of its step. Raises
    CheckpointError if it belongs to another run.
    """
    pulse.tell(pulse.RESTORE)
    stages.enter("looking for a checkpoint")
    directory = prepared.directory
    snapshots = open_snapshots(setup, checkpoints, clear=prepared.chooses)
    found = snapshots.newest(checkpoints.newest() or 0) if snapshots else None
    if found is None:
        with naming_settings(directory, setup, prepared.data, prepared.seams):
            found = chosen_or_newest(checkpoints, directory, prepared.step, setup.state)
    if found is None:
        return Finding(None, [], snapshots)
    where = f"step {found.step} of {directory}"
    recorded_there = recorded(directory)
    remarks = check_identity(found.meta, setup, prepared.data, where, recorded_there)
    return Finding(found, remarks, snapshots)
