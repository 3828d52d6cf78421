"""Writes RUN/bundles/STEP: what is needed to repeat a bad step, small enough to send to somebody.

A bundle is written when a step is skipped, or when the run goes back, diverges, finds a corrupted
device or crashes. It holds the record of the start, the figures and hashes of the last steps, and
the samples since the last checkpoint, but no weights: those are in that checkpoint, which
bundle.json names. All files are JSON, or arrays without pickle, and together they stay below
`MOST_BYTES`.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdtrain.config.errors import UserError
from spmdtrain.config.run_files import (
    BUNDLE,
    BUNDLES,
    CHECKPOINTS,
    COMPILED,
    METRICS,
    START,
    STARTS,
    STEPS,
    newest_lines,
    steps_in,
)
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.source import Data
from spmdtrain.running.report.json_lines import JsonLines, numbers, write_document
from spmdtrain.running.report.sinks import Figures, MakeSink

SAMPLES = "samples.npz"
MOST_BYTES = 1_000_000  # of a bundle
MOST_BUNDLES = 16  # bundles of a run: the first bad steps tell most
FIGURES_KEPT, STEPS_KEPT, PRINTS_KEPT = 256, 1000, 2  # last lines that a bundle includes
READ_BYTES = 1 << 21  # at the end of metrics.jsonl and of steps.jsonl
MOST_ENTRIES = 1 << 22  # of all samples, before they are compressed
BAD = ("diverged", "skipped", "rolled_back", "corrupted")  # the events that ask for a bundle


def bundling(data: Data) -> MakeSink:
    """Returns a sink that writes a bundle of each bad step of a run on `data`."""
    return lambda directory, config, step: BundleSink(directory, config, step, data)


class BundleSink:
    """A sink that writes a bundle of each bad step, once steps.jsonl has the line of that step."""

    def __init__(self, directory: Path, config: RunConfig, step: int, data: Data):  # noqa: ARG002
        self._directory = directory
        self._config = config
        self._data = data
        self._bad: tuple[int, dict[str, Any]] | None = None

    def metrics(self, step: int, figures: Figures) -> None:  # noqa: ARG002
        """Writes the waiting bundles, since a later step has been read."""
        if self._bad and step > self._bad[0]:
            self.close()

    def event(self, event: str, step: int, values: Figures) -> None:
        """Notes a bad step."""
        if event in BAD:
            self.close()
            self._bad = step, {"event": event, **values}

    def close(self) -> None:
        """Writes the waiting bundles."""
        if self._bad:
            step, why = self._bad
            self._bad = None
            write_bundle(self._directory, self._config, self._data, step, why)


@contextlib.contextmanager
def bundled_at_crash(directory: Path, config: RunConfig, data: Data) -> Iterator[None]:
    """Writes a bundle if the work inside ends with an error that is not a user's mistake."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a crash may be of any kind, and is raised again
        if jax.process_index() == 0:
            why = {"event": "crashed", "why": f"{type(error).__name__}: {error}"[:2000]}
            write_bundle(directory, config, data, _last_step(directory) + 1, why)
        raise


def write_bundle(
    run: Path, config: RunConfig, data: Data, step: int, why: Mapping[str, Any]
) -> Path | None:
    """Writes the bundle of a bad `step`, and returns its folder; None if it already has one, or the
    run has too many.

    If the disk refuses it, the result is None too: the error that ended the run matters more.
    """
    folder = run / BUNDLES / str(step)
    begun = (run / STARTS).is_dir()
    made = list((run / BUNDLES).glob("*")) if (run / BUNDLES).is_dir() else []
    if not begun or folder.exists() or len(made) >= MOST_BUNDLES:
        return None
    spare = folder.with_name(f".{step}.tmp")
    try:
        spare.mkdir(parents=True)
        _fill(spare, run, config, data, step, why)
        spare.rename(folder)
    except (OSError, UserError, ValueError):
        shutil.rmtree(spare, ignore_errors=True)
        return None
    return folder


def _fill(
    folder: Path, run: Path, config: RunConfig, data: Data, step: int, why: Mapping[str, Any]
) -> None:
    before = max((at for at in steps_in(run) if at < step), default=None)
    starts = [path for path in (run / STARTS).glob("*.json") if path.stem.isdecimal()]
    shutil.copyfile(max(starts, key=lambda path: int(path.stem)), folder / START)
    if (run / COMPILED).exists():
        shutil.copyfile(run / COMPILED, folder / COMPILED)
    _write_lines(folder / METRICS, newest_lines(run / METRICS, READ_BYTES)[-FIGURES_KEPT:])
    steps = [line for line in newest_lines(run / STEPS, READ_BYTES) if line["step"] <= step][
        -STEPS_KEPT:
    ]
    for line in steps[:-PRINTS_KEPT]:
        line.pop("after", None)
    _write_lines(folder / STEPS, steps)
    mine = [line for line in steps if line["step"] > (before or 0)]
    document = {
        "format": 1,
        "step": step,
        **numbers(dict(why)),
        "from_step": before,
        "checkpoint": None if before is None else str((run / CHECKPOINTS / str(before)).absolute()),
        "sample": mine[0]["samples"][0] if mine else None,
    }
    write_document(folder / BUNDLE, document)
    _write_samples(folder / SAMPLES, mine, config, data)
    _shrink(folder)


def _write_samples(
    path: Path, steps: Sequence[Mapping[str, Any]], config: RunConfig, data: Data
) -> None:
    """Writes the rows of the steps, unless they are too many for a bundle, as arrays beside the
    tokens of a corpus are.
    """
    ids = np.concatenate(
        [np.arange(a, b + 1) for a, b in (line["samples"] for line in steps)] or [[]]
    )
    entries = len(ids) * config.train.sequence_length
    if not len(ids) or entries > MOST_ENTRIES or config.beside_tokens is not None:
        return
    rows = data.train_samples(config)(ids.astype(np.int64))
    arrays: dict[str, Any] = {name: np.asarray(x) for name, x in rows.items()}
    np.savez_compressed(path, **arrays)


def _shrink(folder: Path) -> None:
    """Removes the largest files that a replay can do without, until the bundle is small enough."""
    for name in (SAMPLES, COMPILED, METRICS):
        if sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES:
            return
        (folder / name).unlink(missing_ok=True)


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    file = JsonLines(path)
    try:
        for line in lines:
            file.write(**line)
    finally:
        file.close()


def _last_step(run: Path) -> int:
    return max((line["step"] for line in newest_lines(run / STEPS, READ_BYTES)), default=0)
