"""Explains why a step stands out, by repeating it with one thing changed at a time.

The most certain answers come first. If an exact replay gives another result, the machine made an
error. If the spike disappears in float32, the precision was too low; if it disappears without the
samples of the highest loss, they are the cause; if it disappears at the usual learning rate, the
rate is. Removing half of the spike is enough. If no cause is found, the replay continues to the
next record of the state's leaves, because a wrong weight may leave no trace in the figures.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.lab.replay import spike
from spmdtrain.lab.replay.again import steps_again
from spmdtrain.lab.replay.first_difference import Mismatch
from spmdtrain.lab.replay.opened import Opened, changed_setting, open_replay, with_changes
from spmdtrain.lab.replay.read_bundle import is_bundle
from spmdtrain.lab.replay.replay import step_in_question, unlike
from spmdtrain.lab.replay.samples import far_samples, text_of_samples
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.batch import Batch
from spmdtrain.train.state import TrainState

Cause = Literal["machine", "precision", "data", "rate", "unexplained", "ordinary"]
AFTER = 1  # later steps whose figures count as well: bad weights show in the next loss
RAISED = 1.2  # multiple of the usual rate that makes the rate a suspect


@dataclass(frozen=True)
class Explained:
    """The explanation of why `step` stands out.

    It does so by `seen` deviations, or None if too few steps precede it. `without` has the
    deviations that remain after each change. `first` is the first difference, if the replay is not
    equal. `samples` are the (global index, loss) of samples far above the loss `typical` of the
    rest, and `texts` their beginnings. `rate` is the largest learning rate since the checkpoint,
    and `usual` the one before.
    """

    step: int
    cause: Cause
    seen: float | None
    without: Mapping[str, float | None]
    first: Mismatch | None = None
    samples: Sequence[tuple[int, float]] = ()
    typical: float | None = None
    texts: Sequence[str] = ()
    rate: float | None = None
    usual: float | None = None

    def document(self) -> dict[str, Any]:
        """Returns the explanation as JSON values; an infinite deviation is null."""
        document = asdict(self)
        document["seen"] = _finite(self.seen)
        document["without"] = {name: _finite(value) for name, value in self.without.items()}
        return document


def explain(
    run: str | Path,
    step: int | None = None,
    *,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    overrides: Sequence[str] = (),
    seams: Mapping[str, Any] | None = None,
    own: Sequence[str] = (),
) -> Explained:
    """Explains why `step` of a run, or the bad step of a bundle, stands out.

    The keywords are those of `replay`; `seams` are the optimizer=, learning_rate=, loss= and data=
    that were passed to the run. Raises UserError as `replay` does.
    """
    step = step_in_question(Path(run), step)
    with open_replay(
        run, step, overrides=overrides, make=make, devices=devices, seams=seams, own=own
    ) as opened:
        return _Case(opened, step, has_next=not is_bundle(Path(run))).explained()


class _Case:
    """A step to explain."""

    def __init__(self, opened: Opened, step: int, has_next: bool):
        self._opened = opened
        self._step = step
        self._wrote = opened.written.figures
        self._has_next = has_next
        self._last = step + AFTER if self._continues_to(step + AFTER) else step
        self._before = spike.recent(self._wrote, step)

    def explained(self) -> Explained:
        first, at_step = self._replayed()
        now = [self._wrote[at] for at in range(self._step, self._last + 1) if at in self._wrote]
        deviations = spike.deviations(self._before, now)
        if first is not None:
            return Explained(self._step, "machine", deviations, {}, first=first)
        if deviations is None or deviations < spike.OUTSTANDING:
            hidden = self._hidden()
            cause = "machine" if hidden else "ordinary"
            return Explained(self._step, cause, deviations, {}, hidden)
        without: dict[str, float | None] = {}
        if self._opened.setup.config.precision.compute != "float32":
            wide = with_changes(self._opened, ("precision.compute=float32",))
            without["float32"] = self._deviations(wide)
            if spike.is_healed(deviations, without["float32"]):
                return Explained(self._step, "precision", deviations, without)
        return self._by_data(deviations, without, at_step)

    def _continues_to(self, last: int) -> bool:
        """Returns True if the run took the steps up to `last`, with the same settings."""
        took_it = self._has_next and last in self._wrote
        return took_it and changed_setting(self._opened.written, self._step - 1, last) is None

    def _hidden(self) -> Mismatch | None:
        """Returns the first difference up to the next record of leaves, which figures do not show.

        A weight that no later batch reads may be wrong without affecting any loss.
        """
        opened, written = self._opened, self._opened.written
        later = sorted(at for at in {*opened.prints, *written.steps} if at > self._last)
        at = next((at for at in later if opened.prints.get(at) or written.prints(at)), None)
        if at is None or not self._continues_to(at):
            return None
        differences = (unlike(opened, again) for again in steps_again(opened, at))
        return next(filter(None, differences), None)

    def _replayed(self) -> tuple[Mismatch | None, tuple[TrainState, Batch]]:
        """Returns the first difference of an exact replay, and the state and batch of the step."""
        first = None
        before = self._opened.begin()
        at_step: tuple[TrainState, Batch] | None = None
        for again in steps_again(self._opened, self._last):
            first = first or unlike(self._opened, again)
            if again.step == self._step - 1:
                before = jax.tree.map(jnp.copy, again.state)
            if again.step == self._step:
                at_step = before, again.batch
        assert at_step is not None, "the step in question is among the repeated ones"
        return first, at_step

    def _by_data(
        self, deviations: float, without: dict[str, float | None], at_step: tuple[TrainState, Batch]
    ) -> Explained:
        far = far_samples(self._opened.setup, *at_step)
        if far.samples:
            bad = [index for index, _ in far.samples]
            without["without samples"] = self._deviations(
                self._opened, _leaving_out(self._step, bad)
            )
            if spike.is_healed(deviations, without["without samples"]):
                texts = text_of_samples(self._opened.setup, self._opened.data, at_step[1], bad)
                return Explained(
                    self._step,
                    "data",
                    deviations,
                    without,
                    samples=far.samples,
                    typical=far.typical,
                    texts=texts,
                )
        return self._by_rate(deviations, without)

    def _by_rate(self, deviations: float, without: dict[str, float | None]) -> Explained:
        since = range(self._opened.start + 1, self._step + 1)
        rates = [self._wrote[at]["learning_rate"] for at in since if at in self._wrote]
        earlier = [rate for figures in self._before if (rate := figures.get("learning_rate"))]
        usual = float(np.median(earlier))
        rate = max(rates, default=usual)
        if rate > RAISED * usual:
            calm = with_changes(self._opened, _at_rate(usual), own_rate=False)
            without["usual rate"] = self._deviations(calm)
            if spike.is_healed(deviations, without["usual rate"]):
                return Explained(self._step, "rate", deviations, without, rate=rate, usual=usual)
        hidden = self._hidden()
        cause = "machine" if hidden else "unexplained"
        return Explained(self._step, cause, deviations, without, hidden, rate=rate, usual=usual)

    def _deviations(
        self, opened: Opened, change: Callable[[int, Batch], Batch] | None = None
    ) -> float | None:
        taken = steps_again(opened, self._last, change=change)
        now = [again.figures for again in taken if again.step >= self._step]
        return spike.deviations(self._before, now)


def _at_rate(rate: float) -> tuple[str, ...]:
    return (
        f"optimizer.learning_rate={rate!r}",
        "optimizer.final_learning_rate=0",
        "optimizer.schedule=constant",
        "optimizer.warmup=0",
    )


def _leaving_out(at: int, samples: Sequence[int]) -> Callable[[int, Batch], Batch]:
    """Returns a change that masks these samples in the batch of step `at`."""

    def change(step: int, batch: Batch) -> Batch:
        if step != at:
            return batch
        is_other = ~np.isin(np.asarray(batch["sample"]), np.asarray(samples, np.uint32))
        mask = np.asarray(batch["mask"]) * is_other[..., None].astype(np.float32)
        return batch | {"mask": jax.device_put(mask, batch["mask"].sharding)}

    return change


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
