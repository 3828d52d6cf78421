"""[pipeline]: the order of the stages' work."""

from typing import Literal, get_args

from pydantic import Field, model_validator

from spmdtrain.config.near import did_you_mean
from spmdtrain.config.settings import Count, LocalPath, Settings

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class PipelineConfig(Settings):
    """The order of the stages' work. Read only if mesh.pipeline gives several stages."""

    schedule: LocalPath = Field(
        default="1f1b",
        description="gpipe | 1f1b | interleaved | zero_bubble | "
        "a .json or .csv file, as written by `spmdtrain schedule`",
    )
    chunks: Count = Field(
        default=1,
        description="separate blocks of layers per stage, each with 1 / chunks of the stage's "
        "layers (interleaved, zero_bubble)",
    )

    @model_validator(mode="after")
    def _check(self):
        known = get_args(PipelineSchedule)
        if self.schedule not in known and not self.is_file:
            raise ValueError(
                f"pipeline.schedule={self.schedule!r:.80} is none of {', '.join(known)} "
                f"and no .json or .csv file{did_you_mean(self.schedule, known)}"
            )
        if self.chunks > 1 and self.schedule in ("gpipe", "1f1b"):
            raise ValueError(
                f"pipeline.chunks={self.chunks}: {self.schedule} has one chunk per stage; "
                "set pipeline.schedule='interleaved'"
            )
        return self

    @property
    def is_file(self) -> bool:
        """True if `schedule` is the path of a file, not the name of a built-in schedule."""
        return self.schedule.endswith((".json", ".csv"))
