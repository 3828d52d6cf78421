"""The timetable of `train.stages`: number and length of a step's samples, and its frozen layers.

A *sample* is a window of `train.sequence_length` tokens. A stage of shorter sequences cuts each
sample into pieces, so that the order of samples does not depend on the stages: a step reads the
samples after those of the step before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Warmup(Protocol):
    """The settings of a stage of `train.stages`; see `BatchStage`."""

    @property
    def until(self) -> int | None: ...

    @property
    def tokens(self) -> int | None: ...

    @property
    def global_batch(self) -> int | None: ...

    @property
    def sequence_length(self) -> int | None: ...

    @property
    def frozen_layers(self) -> int | None: ...


@dataclass(frozen=True)
class TimedStage:
    """The steps after `first`, up to `last`, which one program takes.

    A step has `global_batch` sequences of `sequence_length` tokens: `pieces` of each of `samples`
    samples. The steps up to `first` have read `samples_before`. The last stage has no `last`.
    `frozen_layers` replaces `finetune.frozen_layers`, if it is not None.
    """

    first: int
    last: int | None
    global_batch: int
    sequence_length: int
    pieces: int
    samples_before: int
    frozen_layers: int | None = None

    @property
    def samples(self) -> int:
        """The samples that a step reads."""
        return self.global_batch // self.pieces

    @property
    def tokens(self) -> int:
        """The tokens that a step reads."""
        return self.global_batch * self.sequence_length

    def has(self, step: int) -> bool:
        """Returns True if the 1-based `step` belongs to this stage."""
        return self.first < step and (self.last is None or step <= self.last)


def timetable(
    stages: Sequence[Warmup], global_batch: int, sequence_length: int
) -> tuple[TimedStage, ...]:
    """Returns the stages of a run, of which the last, without an end, has the given batch.

    Raises ValueError if a stage has no steps, or cuts no whole samples.
    """
    timed: list[TimedStage] = []
    first = before = 0
    for number, stage in enumerate(stages):
        batch = stage.global_batch or global_batch
        length = stage.sequence_length or sequence_length
        pieces = _pieces(number, batch, length, global_batch, sequence_length)
        samples = batch // pieces
        if stage.until is not None:
            last = stage.until
        else:
            assert stage.tokens is not None, "a stage says how it ends"
            last = first - (before * sequence_length - stage.tokens) // (batch * length)
        if last <= first:
            raise ValueError(
                f"train.stages[{number}] ends after step {last}, and begins after step {first}; "
                "set a later end"
            )
        timed.append(TimedStage(first, last, batch, length, pieces, before, stage.frozen_layers))
        before += (last - first) * samples
        first = last
    return *timed, TimedStage(first, None, global_batch, sequence_length, 1, before)


def _pieces(number: int, batch: int, length: int, global_batch: int, sequence_length: int) -> int:
    """Returns into how many pieces a stage cuts a sample."""
    where = f"train.stages[{number}]"
    if sequence_length % length:
        near = next(
            n for n in range(min(length, sequence_length), 0, -1) if not sequence_length % n
        )
        raise ValueError(
            f"{where}.sequence_length={length} does not divide train.sequence_length="
            f"{sequence_length}, whose samples it cuts; set {near}"
        )
    pieces = sequence_length // length
    if batch % pieces:
        raise ValueError(
            f"{where}.global_batch={batch} is not divisible by the {pieces} sequences of "
            f"{length} tokens that a sample holds; set {-(-batch // pieces) * pieces}"
        )
    if batch > global_batch * pieces:
        raise ValueError(
            f"{where} reads {batch} x {length} tokens a step, more than the {global_batch} x "
            f"{sequence_length} that it warms up to; set a global_batch of at most "
            f"{global_batch * pieces}"
        )
    return pieces
