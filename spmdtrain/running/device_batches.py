"""The batches of a run, on their devices, made ahead of the step."""

from spmdtrain.data.batches import ReadAhead, batch_ids
from spmdtrain.data.source import Data
from spmdtrain.train.batch import to_devices
from spmdtrain.train.setup import Setup


def batches(setup: Setup, data: Data, step: int, sample: int) -> ReadAhead:
    """Device batches of `step` and the steps after it.

    The batch of `step` begins at the global sample index `sample`.
    """
    config = setup.config
    samples = data.train_samples(config)

    def make(at: int):
        ids = sample + batch_ids(at - step, config.train.global_batch)
        return to_devices(samples, ids, setup.batch_shape, setup.mesh, setup.rules)

    return ReadAhead(make, step, config.data.read_ahead)
