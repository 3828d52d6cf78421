"""The batches of a run on their devices, made ahead of the steps."""

from spmdtrain.config.given import as_whole
from spmdtrain.data.batches import ReadAhead, batch_ids
from spmdtrain.data.indices import LAST_SAMPLE
from spmdtrain.data.source import Data, check_data
from spmdtrain.train.setup import Setup, check_setup


def batches(setup: Setup, data: Data, step: int, sample: int) -> ReadAhead:
    """Returns the device batches of `step` and of the steps after it.

    The batch of `step` begins at the global sample index `sample`. Raises ConfigError if an
    argument is of the wrong kind.
    """
    check_setup(setup)
    check_data(data)
    step = as_whole(step, "step", 0, 2**31 - 1)
    sample = as_whole(sample, "sample", 0, LAST_SAMPLE)
    config = setup.config
    samples = data.train_samples(config)

    def make(at: int):
        ids = sample + batch_ids(at - step, config.train.global_batch)
        return setup.to_devices(samples, ids)

    return ReadAhead(make, step, config.data.read_ahead)
