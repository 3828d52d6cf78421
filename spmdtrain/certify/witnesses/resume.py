"""Compares a run in three parts with the same run in one, and restores its checkpoint on one
device.
"""

import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from spmdtrain.certify.stepper import Own
from spmdtrain.certify.witnesses.witness import Witness
from spmdtrain.checkpoints.restore import restore
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config import RunConfig, from_resolved, resolved
from spmdtrain.data.source import open_data
from spmdtrain.running import loop
from spmdtrain.train.compared.in_order import Plain, plain_state

EVERY = 2  # steps between checkpoints
CUTS = (2, 4)  # the steps after which the run is stopped
SETTINGS = (f"checkpoint.every={EVERY}", "checkpoint.keep=9", "log.every=1")
PARTS = "a run in three parts is the run in one, to the bit"
ELSEWHERE = "its checkpoint is the same on one device"


def resumed(small: RunConfig, layout: Sequence[str], devices: int, own: Own) -> list[Witness]:
    """Returns the two witnesses of resuming a run in this layout.

    `small`: the run on one device; `layout`: the settings of the layout.
    """
    config = with_settings(small, (*layout, *SETTINGS))
    alone = with_settings(small, SETTINGS)
    here = jax.devices()[:devices]
    with tempfile.TemporaryDirectory() as room, _silent():
        whole, cut = Path(room) / "whole", Path(room) / "cut"
        _run(config, whole, here, own, None)
        for at in (*CUTS, None):
            _run(config, cut, here, own, at)
        one, same, elsewhere = (
            _restored(config, whole, here, own),
            _restored(config, cut, here, own),
            _restored(alone, whole, jax.devices()[:1], own),
        )
        unlike = _saved_unlike(whole, cut)
    holds, said = _told(one, same)
    return [
        Witness(PARTS, holds and not unlike, said or unlike),
        Witness(ELSEWHERE, *_told(one, elsewhere)),
    ]


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Returns the run with `a.b=c` strings on top."""
    return from_resolved(resolved(config), settings)


def _run(
    config: RunConfig, directory: Path, devices: Sequence[jax.Device], own: Own, stop: int | None
) -> None:
    def hook(event: str, step: int, _) -> bool:
        return event == "step" and stop is not None and step >= stop - 1

    loop.run(
        config,
        directory,
        make=own.make,
        devices=devices,
        optimizer=own.optimizer,
        learning_rate=own.learning_rate,
        loss=own.loss,
        hooks=[hook],
    )


def _restored(config: RunConfig, directory: Path, devices: Sequence[jax.Device], own: Own) -> Plain:
    setup = own.shard(open_data(config)[0], devices)
    return plain_state(setup, restore(directory, setup))


def _saved_unlike(one: Path, other: Path) -> str:
    """Returns the first leaves that differ in the newest checkpoints of two runs.

    Compares the fingerprints that were saved with them: what restoring loses in both runs alike
    shows here.
    """
    found = []
    for directory in (one, other):
        with contextlib.closing(SavedSteps(directory)) as saved:
            newest = saved.newest()
            assert newest is not None
            found.append(saved.meta(newest)["fingerprints"])
    first, second = found
    unlike = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
    return ", ".join(sorted(unlike)[:3])


def _told(one: Plain, other: Plain) -> tuple[bool, str]:
    unlike = [
        str(leaf)
        for leaf in one.keys() | other.keys()
        if leaf not in one
        or leaf not in other
        or not np.array_equal(one[leaf], other[leaf], equal_nan=one[leaf].dtype.kind == "f")
    ]
    return not unlike, ", ".join(sorted(unlike)[:3])


@contextlib.contextmanager
def _silent():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
