"""Explains why a step stands out, by repeating it with one thing changed at a time.

The most certain answers come first. A replay that is not equal shows that the machine did something
else. If float32 heals the step, its precision was too low. If the step is ordinary without its
farthest samples, they are the cause; if it is ordinary at the usual rate, the rate is. A change
counts if it removes the spike, or half of it. Without a cause, the replay goes on to the next
record of the state's leaves, because a wrong weight may leave no trace in the figures.
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
from spmdtrain.lab.replay.replay import asked_step, unlike
from spmdtrain.lab.replay.samples import far_samples, text_of_samples
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.batch import Batch
from spmdtrain.train.state import TrainState

Cause = Literal["machine", "precision", "data", "rate", "unexplained", "ordinary"]
AFTER = 1  # steps after the one in question whose figures count: bad weights show in the next loss
RAISED = 1.2  # multiple of the usual rate from which the rate is a suspect


@dataclass(frozen=True)
class Explained:
    """The explanation of why `step` stands out.

    `seen`: by how many deviations it does; None: too few steps before it.

    `without`: the deviations that remain with one thing changed, by the name of the change.
    `first`: what differs first, if the replay is not equal. `samples`: (global index, loss) of
    those far from the rest, whose typical loss is `typical`, with their beginnings in `texts`.
    `rate` and `usual`: the largest learning rate since the checkpoint, and the one before.
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
        found = asdict(self)
        found["seen"] = _finite(self.seen)
        found["without"] = {name: _finite(value) for name, value in self.without.items()}
        return found


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
    """Returns why `step` of a run, or the bad step of a bundle, stands out.

    The keywords are those of `replay`; `seams` are what the run got as optimizer=, learning_rate=,
    loss= and data=. Raises UserError as `replay` does.
    """
    step = asked_step(Path(run), step)
    with open_replay(
        run, step, overrides=overrides, make=make, devices=devices, seams=seams, own=own
    ) as opened:
        return _Case(opened, step, has_next=not is_bundle(Path(run))).explained()


class _Case:
    """One step that is being explained."""

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
        seen = spike.deviations(self._before, now)
        if first is not None:
            return Explained(self._step, "machine", seen, {}, first=first)
        if seen is None or seen < spike.OUTSTANDING:
            hidden = self._hidden()
            return Explained(self._step, "machine" if hidden else "ordinary", seen, {}, hidden)
        without: dict[str, float | None] = {}
        if self._opened.setup.config.precision.compute != "float32":
            wide = with_changes(self._opened, ("precision.compute=float32",))
            without["float32"] = self._deviations(wide)
            if spike.is_healed(seen, without["float32"]):
                return Explained(self._step, "precision", seen, without)
        return self._by_data(seen, without, at_step)

    def _continues_to(self, last: int) -> bool:
        """Returns True if the run took the steps up to `last`, with the same settings."""
        there = self._has_next and last in self._wrote
        return there and changed_setting(self._opened.written, self._step - 1, last) is None

    def _hidden(self) -> Mismatch | None:
        """Returns what differs up to the next record of the state's leaves, though figures agree.

        A weight that no later batch reads may be wrong without a trace in any loss.
        """
        opened, written = self._opened, self._opened.written
        later = sorted(at for at in {*opened.prints, *written.steps} if at > self._last)
        at = next((at for at in later if opened.prints.get(at) or written.prints(at)), None)
        if at is None or not self._continues_to(at):
            return None
        found = (unlike(opened, again) for again in steps_again(opened, at))
        return next(filter(None, found), None)

    def _replayed(self) -> tuple[Mismatch | None, tuple[TrainState, Batch]]:
        """Returns the first difference of an exact replay, and state and batch of the step."""
        first = None
        before = self._opened.begin()
        found: tuple[TrainState, Batch] | None = None
        for again in steps_again(self._opened, self._last):
            first = first or unlike(self._opened, again)
            if again.step == self._step - 1:
                before = jax.tree.map(jnp.copy, again.state)
            if again.step == self._step:
                found = before, again.batch
        assert found is not None, "the step in question is among those that are taken again"
        return first, found

    def _by_data(
        self, seen: float, without: dict[str, float | None], at_step: tuple[TrainState, Batch]
    ) -> Explained:
        far = far_samples(self._opened.setup, *at_step)
        if far.samples:
            bad = [index for index, _ in far.samples]
            without["without samples"] = self._deviations(
                self._opened, _leaving_out(self._step, bad)
            )
            if spike.is_healed(seen, without["without samples"]):
                texts = text_of_samples(self._opened.setup, self._opened.data, at_step[1], bad)
                return Explained(
                    self._step,
                    "data",
                    seen,
                    without,
                    samples=far.samples,
                    typical=far.typical,
                    texts=texts,
                )
        return self._by_rate(seen, without)

    def _by_rate(self, seen: float, without: dict[str, float | None]) -> Explained:
        since = range(self._opened.start + 1, self._step + 1)
        rates = [self._wrote[at]["learning_rate"] for at in since if at in self._wrote]
        earlier = [each["learning_rate"] for each in self._before if each.get("learning_rate")]
        usual = float(np.median(earlier))
        rate = max(rates, default=usual)
        if rate > RAISED * usual:
            calm = with_changes(self._opened, _at_rate(usual), own_rate=False)
            without["usual rate"] = self._deviations(calm)
            if spike.is_healed(seen, without["usual rate"]):
                return Explained(self._step, "rate", seen, without, rate=rate, usual=usual)
        hidden = self._hidden()
        cause = "machine" if hidden else "unexplained"
        return Explained(self._step, cause, seen, without, hidden, rate=rate, usual=usual)

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
    """Returns a change that masks these samples in the batch of step `at`, so the loss is that of
    the rest.
    """

    def change(step: int, batch: Batch) -> Batch:
        if step != at:
            return batch
        kept = ~np.isin(np.asarray(batch["sample"]), np.asarray(samples, np.uint32))
        mask = np.asarray(batch["mask"]) * kept[..., None].astype(np.float32)
        return batch | {"mask": jax.device_put(mask, batch["mask"].sharding)}

    return change


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
