"""[checkpoint]: when a run is saved, and which checkpoints are kept."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, CountOrZero, Settings


class CheckpointConfig(Settings):
    """The interval between checkpoints, and how many are kept."""

    every: CountOrZero | Literal["auto"] = Field(
        default=100,
        description="steps between checkpoints; the last step is always saved; 0: only that; "
        "auto: the interval that loses the least time, given the measured times of a save and a "
        "step",
    )
    keep: Count | Literal["best"] = Field(
        default=2,
        description="newest checkpoints kept; best: the newest and the one with the lowest "
        "eval_loss, the same as keep = 1 and keep_best = 1",
    )
    keep_best: CountOrZero = Field(
        default=0,
        description="checkpoints with the lowest eval_loss that are also kept; a step whose "
        "evaluation is among the best is saved even if no checkpoint is due",
    )
    keep_every: CountOrZero = Field(
        default=0,
        description="one checkpoint per this many steps is kept forever; 0: none",
    )
    memory_every: CountOrZero = Field(
        default=0,
        description="steps between copies of the state in memory of `spmdtrain launch`, from which "
        "the run continues after a process has died; 0: none",
    )
    memory_peer: bool = Field(
        default=False,
        description="whether another host keeps a copy of what `memory_every` leaves in memory, "
        "in case a host is lost; needs a launcher on each host",
    )
    export: CountOrZero = Field(
        default=0,
        description="checkpoints from one export to the next, a Hugging Face directory "
        "RUN/exports/STEP; counted from where the run starts or resumes; the last "
        "checkpoint is always exported; 0: none",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.memory_peer and not self.memory_every:
            raise ValueError(
                "memory_peer copies what memory_every leaves in memory; try memory_every=1"
            )
        return self


def refusals(run: Any) -> Iterator[str]:
    """Yields a refusal of the best checkpoints if nothing is evaluated."""
    if (run.checkpoint.keep == "best" or run.checkpoint.keep_best) and not run.eval.every:
        yield (
            "the best checkpoints are those with the lowest eval_loss, and eval.every=0 "
            "never evaluates; set eval.every=100"
        )
