"""Puts the batches of a run on their devices, ahead of the steps."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spmdtrain.config.arguments import as_whole
from spmdtrain.data.batches import ReadAhead
from spmdtrain.data.indices import LAST_SAMPLE
from spmdtrain.data.source import Data, check_data
from spmdtrain.train.batch import Samples
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.stages import setup_of, stages_of

Saw = Callable[[int, Mapping[str, np.ndarray]], None]


def batches(
    setup: Setup, data: Data, step: int, sample: int, *, saw: Sequence[Saw] = ()
) -> ReadAhead:
    """Returns the device batches of `step` and of the steps after it.

    The batch of `step` begins at the global sample index `sample`. Each of `saw` is called as
    `saw(step, rows)` with the rows that this process makes of each batch, each row once, in the
    thread that makes them.
    Raises ConfigError if an argument is of the wrong kind.
    """
    check_setup(setup)
    check_data(data)
    step = as_whole(step, "step", 0, 2**31 - 1)
    sample = as_whole(sample, "sample", 0, LAST_SAMPLE)
    config = setup.config
    samples = data.train_samples(config)
    of_stage = {stage: setup_of(setup, stage) for stage in stages_of(setup)}
    first = sample - config.train.samples_before(step)

    def make(at: int):
        stage = config.train.stage_of(at + 1)
        ids = first + config.train.samples_before(at) + np.arange(stage.samples, dtype=np.int64)
        ids = config.own_samples(ids)
        sequences = samples
        if stage.pieces > 1:
            from spmdtrain.data.cut_samples import in_pieces, sequences_of

            sequences, ids = in_pieces(samples, stage.pieces), sequences_of(ids, stage.pieces)
        if saw:
            sequences = shown(at, sequences)
        return of_stage[stage].to_devices(sequences, ids)

    def shown(at: int, sequences: Samples) -> Samples:
        def make_rows(ids: np.ndarray) -> Mapping[str, np.ndarray]:
            rows = sequences(ids)
            for show in saw:
                show(at, rows)
            return rows

        return make_rows

    return ReadAhead(make, step, config.data.read_ahead)
