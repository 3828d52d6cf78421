"""Repeats the steps of a run, and decides whether they are equal.

On the mesh of the run every figure must be bit-equal, and so must every leaf of the checkpoints in
between. On another mesh the figures may differ as much as those of siblings (rounding.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdtrain.checkpoints.leaves.fingerprint import fingerprints
from spmdtrain.checkpoints.leaves.stored_items import arrays_of
from spmdtrain.checkpoints.meta import named_leaves
from spmdtrain.config.arguments import as_whole
from spmdtrain.config.errors import ConfigError
from spmdtrain.lab.replay.again import Again, steps_again
from spmdtrain.lab.replay.first_difference import Mismatch, different_figures, different_leaves
from spmdtrain.lab.replay.opened import Opened, open_replay
from spmdtrain.lab.replay.read_bundle import is_bundle, step_of
from spmdtrain.lab.replay.rounding import FIGURES, figures_again, limits
from spmdtrain.models.choose import MakeModel
from spmdtrain.running.record.token_hash import sums_of_batch, text_of
from spmdtrain.train.stages import setup_at

LAST_STEP = 2**31 - 1


@dataclass(frozen=True)
class Replayed:
    """A replay of the steps after `start`, up to `last`.

    `leaves` has, by step with a checkpoint or fingerprints, the number of equal leaves and that of
    all. `first` is the first difference, and `twice` says whether a second replay equals the first.
    On another mesh `apart` is the largest relative distance of a figure from the run, and `limit`
    how far rounding may move that figure.
    """

    run: str
    start: int
    last: int
    samples: tuple[int, int]
    elsewhere: bool
    leaves: dict[int, tuple[int, int]] = field(default_factory=dict)
    first: Mismatch | None = None
    twice: bool | None = None
    apart: float | None = None
    limit: float | None = None

    @property
    def equal(self) -> bool:
        """True if the steps equal those of the run."""
        return self.first is None

    def document(self) -> dict[str, Any]:
        """Returns the replay as JSON values."""
        return {"equal": self.equal} | asdict(self)


def replay(  # noqa: PLR0913 - a keyword for each part that a caller may replace
    run: str | Path,
    step: int | None = None,
    *,
    to: int | None = None,
    overrides: Sequence[str] = (),
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    optimizer: Any = None,
    learning_rate: Any = None,
    loss: Any = None,
    data: Any = None,
    own: Sequence[str] = (),
) -> Replayed:
    """Repeats the steps of `run` from the checkpoint before `step` up to `to`.

    `run` may be a bundle; `step` is then its bad step by default. `to` defaults to `step`.
    `overrides` are `a.b=c` strings for another mesh; `own` are the files and modules whose code may
    run if [own] of the run names it; the other keywords are those that were passed to the run, see
    `run`. Raises UserError if the run has not taken these steps or cannot be opened.
    """
    step = as_whole(step_in_question(Path(run), step), "step", 1, LAST_STEP)
    last = step if to is None else as_whole(to, "to", 1, LAST_STEP)
    if last < step:
        raise ConfigError(f"to={last} is before step={step}", fix=f"to={step} or later")
    seams = {"optimizer": optimizer, "learning_rate": learning_rate, "loss": loss, "data": data}
    with open_replay(
        run, step, to=last, overrides=overrides, make=make, devices=devices, seams=seams, own=own
    ) as opened:
        return _elsewhere(opened, last) if opened.elsewhere else _here(opened, last)


def step_in_question(run: Path, step: int | None) -> int:
    """Returns `step`, or by default the bad step of a bundle."""
    if step is not None:
        return step
    if not is_bundle(run):
        raise ConfigError("a run has many steps: which one?", fix="--step N")
    return step_of(run)


def prints_of(again: Again) -> dict[str, tuple[int, int]]:
    """Returns the fingerprints of the state after a step, by the names in checkpoints."""
    return fingerprints(named_leaves(arrays_of(again.state)))


def _here(opened: Opened, last: int) -> Replayed:
    leaves: dict[int, tuple[int, int]] = {}
    first: Mismatch | None = None
    for again in steps_again(opened, last):
        difference = unlike(opened, again, leaves)
        first = first or difference
    twice = None if first is None else _is_repeated(opened, first.step)
    return Replayed(
        str(opened.run),
        opened.start,
        last,
        _samples(opened, last),
        elsewhere=False,
        leaves=leaves,
        first=first,
        twice=twice,
    )


def unlike(
    opened: Opened, again: Again, leaves: dict[int, tuple[int, int]] | None = None
) -> Mismatch | None:
    """Returns the first difference of a step from the record; None if there is none.

    If the record has fingerprints of this step, their counts (equal, all) are added to `leaves`.
    """
    step = again.step
    difference = _other_tokens(opened, again)
    recorded = opened.written.figures.get(step, {})
    names = different_figures(again.figures, recorded)
    if names and difference is None:
        name = names[0]
        values = again.figures[name], recorded[name]
        difference = Mismatch(step, "figure", name, *values, others=len(names) - 1)
    saved = opened.prints.get(step) or opened.written.prints(step)
    if saved:
        paths = list(opened.setup.model.parameters)
        different = different_leaves(prints_of(again), saved, paths)
        if leaves is not None:
            leaves[step] = (len(saved) - len(different), len(saved))
        if different and difference is None:
            difference = Mismatch(step, "leaf", different[0], others=len(different) - 1)
    return difference


def _other_tokens(opened: Opened, again: Again) -> Mismatch | None:
    recorded = opened.written.tokens(again.step)
    if recorded is None:
        return None
    first, second = np.asarray(sums_of_batch(setup_at(opened.setup, again.step), again.batch))
    here = text_of((int(first), int(second)))
    return None if here == recorded else Mismatch(again.step, "tokens", "tokens", here, recorded)


def _is_repeated(opened: Opened, last: int) -> bool:
    """Returns True if two replays up to `last` are bit-equal, in figures and leaves."""
    ways = []
    for _ in range(2):
        figures = []
        prints = {}
        for again in steps_again(opened, last):
            figures.append(again.figures)
            if again.step == last:
                prints = prints_of(again)
        ways.append((figures, prints))
    return ways[0] == ways[1]


def _elsewhere(opened: Opened, last: int) -> Replayed:
    figures = figures_again(opened, last)
    allowed_by_step = limits(opened, last, figures)
    first = None
    apart = limit = 0.0
    for step, (here, allowed) in enumerate(
        zip(figures, allowed_by_step, strict=True), opened.start + 1
    ):
        recorded = opened.written.figures.get(step, {})
        for name in FIGURES:
            mine, theirs = here.get(name), recorded.get(name)
            if mine is None or theirs is None:
                is_far = mine != theirs and name in recorded
            else:
                is_far = abs(mine - theirs) > allowed[name]
                scale = max(abs(theirs), 1e-30)
                apart = max(apart, abs(mine - theirs) / scale)
                limit = max(limit, allowed[name] / scale)
            if is_far and first is None:
                first = Mismatch(step, "figure", name, mine, theirs)
    return Replayed(
        str(opened.run),
        opened.start,
        last,
        _samples(opened, last),
        elsewhere=True,
        first=first,
        apart=apart,
        limit=limit,
    )


def _samples(opened: Opened, last: int) -> tuple[int, int]:
    before = opened.setup.config.train.samples_before
    count = before(last) - before(opened.start)
    return opened.sample, opened.sample + count - 1
