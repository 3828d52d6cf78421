"""Feeds the batches to a run, and writes RUN/steps.jsonl: a line for each step, which a replay is
checked against.

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
from spmdtrain.data.source import Data
from spmdtrain.running.device_batches import batches
from spmdtrain.running.record.token_hash import Sums, added, sums_of_batch, sums_of_rows, text_of
from spmdtrain.running.report.json_lines import JsonLines, forget_after
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.stages import setup_at
from spmdtrain.train.state import TrainState

Prints = dict[str, fingerprint.Fingerprint]


class Feed:
    """The batches of the steps after `done`, which are recorded as they are drawn.

    Use it as a context.

    The first batch begins at the global sample index `sample`. A single process hashes the rows in
    the thread that makes them ahead of time. Of several, each hashes its own rows, and the devices
    sum the hashes.
    """

    def __init__(self, setup: Setup, data: Data, done: int, sample: int, directory: Path):
        log = setup.config.log
        self._records = log.record == "hashes"
        self._every = log.fingerprints
        self._setup = setup
        train = setup.config.train
        self._first = sample - train.samples_before(done)  # of step 1, had it gone on
        self._alone = jax.process_count() == 1
        self._sums: dict[int, Sums] = {}
        self._last: Batch | None = None
        self._held: tuple[int, jax.Array | None, Callable[[], Prints] | None] | None = None
        self._file: JsonLines | None = None
        if self._records and jax.process_index() == 0:
            forget_after(directory / STEPS, done or -1)
            self._file = JsonLines(directory / STEPS)
        saw = self._saw if self._records and self._alone else None
        self._ahead = batches(setup, data, done, sample, saw=saw)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._ahead.close)
            if self._file:
                closing.callback(self._file.close)
            # After an error the devices may not answer, and the error is what matters.
            with contextlib.suppress(*([Exception] if error else [])):
                self._flush()

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        batch = next(self._ahead)
        self._last = batch if self._records and not self._alone else None
        return batch

    def taken(self, step: int, state: TrainState) -> None:
        """Records that `step` has been dispatched on the newest batch, and that `state` follows."""
        if not self._records:
            return
        self._flush()
        sums = None
        if self._last is not None:
            sums = sums_of_batch(setup_at(self._setup, step), self._last)
        prints = None
        if self._every and step % self._every == 0:
            prints = fingerprint.begin(named_leaves(arrays_of(state)))
        self._held = step, sums, prints

    def _saw(self, at: int, rows: Mapping[str, np.ndarray]) -> None:
        self._sums[at] = added(self._sums.get(at, (0, 0)), sums_of_rows(rows))

    def _flush(self) -> None:
        """Writes the line of the held step."""
        if self._held is None:
            return
        step, sums, prints = self._held
        self._held = None
        found = self._sums.pop(step - 1) if sums is None else _as_sums(sums)
        line: dict[str, Any] = {"samples": self._samples(step), "tokens": text_of(found)}
        if prints is not None:
            line["after"] = {name: text_of(each) for name, each in prints().items()}
        if self._file:
            self._file.write(step=step, **line)

    def _samples(self, step: int) -> list[int]:
        train = self._setup.config.train
        ends = [self._first + train.samples_before(each) for each in (step - 1, step)]
        return [ends[0], ends[1] - 1]


def _as_sums(sums: jax.Array) -> Sums:
    first, second = np.asarray(sums)
    return int(first), int(second)
