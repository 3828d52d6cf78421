"""Reads a bundle. It may come from someone else, so it is JSON, and arrays without pickle."""

import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import BUNDLE, METRICS, START, STEPS, RunFiles, steps_in
from spmdtrain.data.recorded import RecordedData
from spmdtrain.lab.replay.starts import Start, is_start
from spmdtrain.lab.replay.written import WrittenRun, steps_and_figures
from spmdtrain.running.record.bundle import MOST_BYTES, MOST_ENTRIES, SAMPLES

# Entries of a batch, see data/batches.py; nothing else is read.
ENTRIES = {
    "tokens": "int32",
    "targets": "int32",
    "mask": "float32",
    "sample": "uint32",
    "source": "int32",
    "segment_ids": "int32",
    "positions": "int32",
    "reference": "float32",
}


@dataclass(frozen=True)
class Bundle:
    """The contents of a bundle of the bad step `step`.

    `run` is the directory with its checkpoints, and `start` the checkpoint before the step, or
    None. `sample` is the global index of the first sample after it, and `data` has the samples, if
    they are in the bundle.
    """

    step: int
    run: Path
    start: int | None
    sample: int | None
    data: RecordedData | None
    written: WrittenRun


def is_bundle(path: Path) -> bool:
    """Returns True if the directory is a bundle, and not a run."""
    return (path / BUNDLE).exists()


def step_of(folder: Path) -> int:
    """Returns the bad step of a bundle. Needs no jax."""
    match RunFiles(folder).document(BUNDLE):
        case {"step": int() as step} if step >= 1:
            return step
    raise _damaged(folder, BUNDLE)


def read_bundle(folder: Path) -> Bundle:
    """Reads a bundle. Raises CheckpointError if it is not one, or if its checkpoint is missing."""
    files = RunFiles(folder)
    start = files.document(START)
    if not is_start(start):
        raise _damaged(folder, START)
    match files.document(BUNDLE):
        case {
            "step": int() as step,
            "from_step": int() | None as before,
            "checkpoint": str() | None as checkpoint,
            "sample": int() | None as sample,
        }:
            pass
        case _:
            raise _damaged(folder, BUNDLE)
    steps = files.lines(STEPS)
    figures = files.lines(METRICS) if (folder / METRICS).exists() else []
    by_step, figures_of = steps_and_figures(steps, figures)
    written = WrittenRun(folder, figures_of, by_step, [], [start | {"from_step": 0}])
    data = _samples(folder, start)
    return Bundle(step, _run_of(folder, before, checkpoint), before, sample, data, written)


def _run_of(folder: Path, before: int | None, checkpoint: str | None) -> Path:
    """Returns the run whose checkpoint a bundle needs: the one around it, or the one it names."""
    here = folder.absolute().parent.parent
    if before is None or before in steps_in(here):
        return here
    named = Path(checkpoint or "").parent.parent
    if checkpoint and before in steps_in(named):
        return named
    raise CheckpointError(
        f"{folder} begins at checkpoint {before} of its run, which is not here",
        found=f"neither {here} nor {named} holds it",
        fix="the bundle in RUN/bundles of that run",
    )


def _samples(folder: Path, start: Start) -> RecordedData | None:
    path = folder / SAMPLES
    if not path.exists():
        return None
    info = path.stat()
    if not stat.S_ISREG(info.st_mode) or info.st_size > MOST_BYTES:
        raise _damaged(folder, SAMPLES)
    try:
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as archive:
            rows = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        raise _damaged(folder, SAMPLES) from None
    count = len(rows.get("sample", ()))
    right = count and all(
        name in ENTRIES and x.dtype == ENTRIES[name] and x.ndim in (1, 2) and len(x) == count
        for name, x in rows.items()
    )
    if not right:
        raise _damaged(folder, SAMPLES)
    order = np.argsort(rows["sample"], kind="stable")
    return RecordedData({name: x[order] for name, x in rows.items()}, str(start.get("corpus")))


def _check_sizes(path: Path) -> None:
    """Raises ValueError for a small file that would unpack to far more than a bundle holds."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > 4 * len(ENTRIES) * MOST_ENTRIES:
        raise ValueError("it unpacks to too much")


def _damaged(folder: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{folder / name} is not part of a bundle", fix="another bundle")
