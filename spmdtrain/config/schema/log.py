"""[log]: figures, profiler traces and sinks."""

from typing import Annotated, Literal

from pydantic import Field

from spmdtrain.config.settings import Count, Settings

Steps = Annotated[tuple[Count, ...], Field(strict=False)]
Sinks = Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)]


class LogConfig(Settings):
    """The reports of a run: log lines, profiler traces, and sinks for its figures."""

    every: Count = Field(default=10, description="steps between lines of figures")
    profile: Steps = Field(default=(), description="steps traced by the profiler into RUN/profile")
    report: Literal["never", "end", "live"] = Field(
        default="end",
        description="when the run writes RUN/report.html, a page of itself: at its end; live: also "
        "every 30 s",
    )
    sinks: Sinks = Field(
        default=(),
        description="where figures go, in addition to metrics.jsonl: "
        "tensorboard (RUN/tensorboard), wandb (RUN/wandb)",
    )
