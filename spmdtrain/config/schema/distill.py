"""[distill]: the teacher whose predictions a run learns."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from spmdtrain.config.settings import DerivedOrNone, LocalPath, Positive, Settings, Share


class DistillConfig(Settings):
    """A second, frozen model whose predictions this one learns (arXiv:1503.02531).

    The loss is (1 - share) x cross-entropy + share x temperature^2 x KL(teacher || student), the
    divergence of the softmax of both models' logits over the temperature (docs/distillation.md).
    """

    of_whole_run: ClassVar = ("",)  # what it names need not be at hand later

    teacher: LocalPath | None = Field(
        default=None,
        description="the teacher: a run, whose newest weights are used, or a Hugging Face folder",
    )
    logits: LocalPath | None = Field(
        default=None,
        description="a folder in which `spmdtrain data teach` has saved a teacher's predictions, "
        "instead of a teacher on the mesh",
    )
    temperature: DerivedOrNone[Positive] = Field(
        default=None,
        description="divisor of the logits of both models; above 1, tokens that the teacher finds "
        "unlikely count more; default: 1",
    )
    share: DerivedOrNone[Share] = Field(
        default=None,
        description="share of the loss against the teacher; 1: there is no other; default: 0.5",
    )

    def derived(self) -> dict[str, Any]:
        """Returns temperature and share, which only a run that learns from a teacher has."""
        return {
            "temperature": 1.0 if self.is_on else None,
            "share": 0.5 if self.is_on else None,
        }

    def lost_in_small_runs(self) -> str:
        """Returns the loss against a teacher, if there is one."""
        return (
            "the loss against a teacher: certified with cross-entropy alone" if self.is_on else ""
        )

    @property
    def is_on(self) -> bool:
        """True if the run learns from a teacher, on the mesh or by its saved logits."""
        return self.teacher is not None or self.logits is not None

    @property
    def source(self) -> str:
        """The setting that names where the run learns from, with its value, for messages."""
        if self.logits is not None:
            return f"distill.logits={self.logits!r}"
        return f"distill.teacher={self.teacher!r}"

    def other_runs(self) -> Mapping[str, str | None]:
        return {"teacher": self.teacher and os.path.expanduser(self.teacher)}

    def affecting_numbers(self) -> dict[str, Any]:
        return self.model_dump(mode="json") if self.is_on else {}

    @model_validator(mode="after")
    def _check(self):
        for name in ("temperature", "share"):
            value = getattr(self, name)
            if value is not None and not self.is_on:
                raise ValueError(
                    f"distill.{name}={value:g} belongs to a teacher; set distill.teacher='RUN', or "
                    "distill.logits='DIR'"
                )
        if self.teacher is not None and self.logits is not None:
            raise ValueError(
                f"distill.teacher={self.teacher!r} and distill.logits={self.logits!r} are two "
                "teachers; set one of them to none"
            )
        return self


def refusals(run: Any) -> Iterator[str]:
    """Yields the settings that cannot be combined with a teacher."""
    if not run.distill.is_on:
        return
    if run.distill.logits is not None:
        yield from _of_places(run)
    setting = run.distill.source
    if run.train.learns_pairs:
        yield (
            f"{setting} is for a loss of tokens, and train.preference="
            f"{run.train.preference!r} is one of answers; set train.preference='none'"
        )
    for name in ("label_smoothing", "z_loss"):
        if value := getattr(run.train, name):
            yield (
                f"{setting}: train.{name}={value:g} shapes a loss without a teacher; set "
                f"train.{name}=0.0"
            )
    if run.precision.logits != "float32":
        yield (
            f"{setting} takes its loss from logits in float32, and not as "
            f"precision.logits={run.precision.logits!r}; set precision.logits='float32'"
        )
    if run.model.further_depth:
        yield f"{setting}: a teacher predicts the next token alone; set model.multi_token='none'"


def refusals_of_pipelines(run: Any) -> Iterator[str]:
    """Yields why a pipeline cannot hold a teacher."""
    if run.distill.teacher is not None and run.mesh.pipeline != 1:
        yield (
            f"{run.distill.source}: the stages of mesh.pipeline={run.mesh.pipeline} hold parts of "
            "one model, and a teacher has other layers; set distill.logits, which `spmdtrain data "
            "teach` writes, or mesh.pipeline=1 and split by mesh.fsdp"
        )


def _of_places(run: Any) -> Iterator[str]:
    """Yields why saved logits do not fit the data: they belong to the tokens of one corpus."""
    if run.data.mix:
        reason = "data.mix draws from several"
    elif run.data.is_streamed:
        reason = f"data.corpus={run.data.corpus!r} is a stream"
    elif run.own.data is not None:
        reason = f"own.data={run.own.data!r} makes its own samples"
    else:
        return
    yield (
        f"{run.distill.source} lies beside the tokens of one corpus, and {reason}; set "
        "distill.teacher, or data.corpus='tokens' without data.mix"
    )
