"""[checkpoint]: when a run is saved, and which checkpoints are kept."""

from typing import Literal

from pydantic import Field

from spmdtrain.config.settings import Count, CountOrZero, Settings


class CheckpointConfig(Settings):
    """The interval between checkpoints, and how many are kept."""

    every: CountOrZero | Literal["auto"] = Field(
        default=100,
        description="steps between checkpoints; the last step is always saved; 0: only that; "
        "auto: as often as loses least time, by what a save and a step were measured to take",
    )
    keep: Count | Literal["best"] = Field(
        default=2,
        description="newest checkpoints kept; best: the newest and the one with the lowest "
        "eval_loss, as keep = 1 and keep_best = 1",
    )
    keep_best: CountOrZero = Field(
        default=0,
        description="checkpoints kept besides, those with the lowest eval_loss; a step whose "
        "evaluation is among the best is saved then, due or not",
    )
    keep_every: CountOrZero = Field(
        default=0,
        description="steps, of each so many of which one checkpoint is kept for ever; 0: none is",
    )
