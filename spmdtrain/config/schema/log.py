"""[log]: figures, profiler traces and sinks."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, CountOrZero, Settings

Steps = Annotated[tuple[Count, ...], Field(strict=False)]
Sinks = Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)]


class LogConfig(Settings):
    """The reports of a run: log lines, profiler traces, and sinks for its figures."""

    every: Count = Field(default=10, description="steps between lines of figures")
    profile: Steps = Field(default=(), description="steps traced by the profiler into RUN/profile")
    report: Literal["never", "end", "live"] = Field(
        default="end",
        description="when the run writes its page, RUN/report.html: at its end; live: also every "
        "30 s",
    )
    sinks: Sinks = Field(
        default=(),
        description="where figures go, in addition to metrics.jsonl: "
        "tensorboard (RUN/tensorboard), wandb (RUN/wandb)",
    )
    record: Literal["hashes", "none"] = Field(
        default="hashes",
        description="what steps.jsonl keeps of each step, for `replay`: hashes: its samples and a "
        "hash of its tokens | none",
    )
    fingerprints: CountOrZero = Field(
        default=0,
        description="steps between fingerprints of every weight and moment in steps.jsonl, which "
        "show in which step and leaf a replay differs; 0: checkpoints alone have them",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.fingerprints and self.record == "none":
            raise ValueError(
                f"log.fingerprints={self.fingerprints} are part of a step's record, and "
                "log.record='none' keeps none; set log.record='hashes'"
            )
        return self


def refusals_of_steps(run: Any) -> Iterator[str]:
    """Yields a refusal of steps to trace that are beyond `train.steps`."""
    late = [step for step in run.log.profile if step > run.train.steps]
    if late:
        yield f"log.profile={late} is beyond train.steps={run.train.steps}"
