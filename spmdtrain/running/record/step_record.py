"""Writes RUN/steps.jsonl: a line for each step, which a replay is checked against.

A line has the step, the global indices of its first and last sample, and `tokens`, a hash of what
these samples hold (token_hash.py). With `log.fingerprints` some lines also have `after`, the
fingerprint of each leaf of the state after the step. A line is written once the next step has been
dispatched, so nothing waits for the devices.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdtrain.checkpoints.leaves import fingerprint
from spmdtrain.checkpoints.leaves.stored_items import arrays_of
from spmdtrain.checkpoints.meta import named_leaves
from spmdtrain.config.run_files import STEPS
from spmdtrain.running.device_batches import Saw
from spmdtrain.running.record.token_hash import Sums, added, sums_of_batch, sums_of_rows, text_of
from spmdtrain.running.report.json_lines import JsonLines, forget_after
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.stages import setup_at
from spmdtrain.train.state import TrainState

Prints = dict[str, fingerprint.Fingerprint]


class StepRecord:
    """The record of the steps after `done`. Use it as a context.

    The first batch begins at the global sample index `sample`. A single process hashes the rows in
    the thread that makes them ahead of time, which calls `saw`. Of several, each hashes its own
    rows, and the devices sum the hashes.
    """

    def __init__(self, setup: Setup, done: int, sample: int, directory: Path):
        train = setup.config.train
        is_alone = jax.process_count() == 1
        self.saw: Saw | None = self._hash if is_alone else None
        self._setup = setup
        self._every = setup.config.log.fingerprints
        self._first = sample - train.samples_before(done)  # of step 1, had it gone on
        self._sums: dict[int, Sums] = {}
        self._pending: tuple[int, jax.Array | None, Callable[[], Prints] | None] | None = None
        self._file: JsonLines | None = None
        if jax.process_index() == 0:
            forget_after(directory / STEPS, done or -1)
            self._file = JsonLines(directory / STEPS)

    def __enter__(self) -> "StepRecord":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        with contextlib.ExitStack() as closing:
            if self._file:
                closing.callback(self._file.close)
            # After an error the devices may not answer, and the error is what matters.
            with contextlib.suppress(*([Exception] if error else [])):
                self.flush()

    def after_step(self, step: int, batch: Batch, state: TrainState) -> None:
        """Records that `step` has been dispatched on `batch`, and that `state` follows."""
        self.flush()
        sums = None
        if self.saw is None:
            sums = sums_of_batch(setup_at(self._setup, step), batch)
        prints = None
        if self._every and step % self._every == 0:
            prints = fingerprint.begin(named_leaves(arrays_of(state)))
        self._pending = step, sums, prints

    def flush(self) -> None:
        """Writes the line of the newest step; for when the loop waits for the devices anyway."""
        if self._pending is None:
            return
        step, sums, prints = self._pending
        self._pending = None
        of_step = self._sums.pop(step - 1) if sums is None else _as_sums(sums)
        line: dict[str, Any] = {"samples": self._samples(step), "tokens": text_of(of_step)}
        if prints is not None:
            line["after"] = {name: text_of(print_) for name, print_ in prints().items()}
        if self._file:
            self._file.write(step=step, **line)

    def _hash(self, at: int, rows: Mapping[str, np.ndarray]) -> None:
        self._sums[at] = added(self._sums.get(at, (0, 0)), sums_of_rows(rows))

    def _samples(self, step: int) -> list[int]:
        """Returns the global indices of the first and the last sample of a step."""
        train = self._setup.config.train
        begin, end = (self._first + train.samples_before(at) for at in (step - 1, step))
        return [begin, end - 1]


def _as_sums(sums: jax.Array) -> Sums:
    first, second = np.asarray(sums)
    return int(first), int(second)
