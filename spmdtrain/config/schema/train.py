"""[train]: the length of training, the batch, the loss, and what saves memory; [distill]."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    DerivedOrNone,
    Fraction,
    LocalPath,
    NonNegative,
    Positive,
    Settings,
    Share,
    Tokens,
)
from spmdtrain.config.stages import TimedStage, timetable

# The settings that each loss of pairs has, with their defaults: those of the papers.
PREFERENCE_SETTINGS: dict[str, dict[str, float]] = {
    "none": {},
    "dpo": {"preference_beta": 0.1},
    "simpo": {"preference_beta": 2.0, "preference_gamma": 1.0},
    "orpo": {"preference_lambda": 0.1},
}
SEEDS = 2**32  # jax makes keys of 32 bits: a larger seed would collide with a smaller one


class BatchStage(Settings):
    """A stage at the beginning of a run, with smaller batches, shorter sequences or other frozen
    layers.

    A shorter sequence is a piece of a sample of `train.sequence_length`: a stage changes neither
    the samples of a run nor their order, only how many of them a step reads.
    """

    until: Count | None = Field(default=None, description="its last step")
    tokens: Tokens | None = Field(
        default=None,
        description="instead of until: it ends with the step in which the run has read so many",
    )
    global_batch: Count | None = Field(
        default=None, description="sequences per step; default: train.global_batch"
    )
    sequence_length: Count | None = Field(
        default=None,
        description="tokens per sequence, a divisor of train.sequence_length; default: the same",
    )
    frozen_layers: CountOrZero | None = Field(
        default=None,
        description="number of first layers that are frozen; default: finetune.frozen_layers",
    )

    @model_validator(mode="after")
    def _check(self):
        if (self.until is None) == (self.tokens is None):
            raise ValueError("train.stages: a stage ends by one of both, until=STEP or tokens=N")
        if all(x is None for x in (self.global_batch, self.sequence_length, self.frozen_layers)):
            raise ValueError(
                "train.stages: a stage needs a global_batch or a sequence_length of its own, or "
                "frozen_layers"
            )
        return self


Stages = Annotated[tuple[BatchStage, ...], Field(strict=False)]


class TrainConfig(Settings):
    """The length of training, the size of a batch, the loss, and what saves memory."""

    steps: Count = Field(
        default=1000, description="optimizer steps in total; raise it and resume to train further"
    )
    epochs: Positive | None = Field(
        default=None,
        description="replaces train.steps: the number of passes over the training data, rounded "
        "up to whole steps; not for mixtures",
    )
    global_batch: Count = Field(default=16, description="sequences per step, over all devices")
    microbatch: Count | None = Field(
        default=None,
        description="sequences per batch shard at once; default: all of them, i.e. no accumulation",
    )
    sequence_length: Count = Field(default=128, description="tokens per sequence")
    stages: Stages = Field(
        default=(),
        description="stages before those settings hold: smaller batches, shorter sequences "
        "(docs/warmups.md), other frozen layers (docs/finetuning.md)",
    )
    seed: int = Field(
        default=0, ge=0, lt=SEEDS, description="seed of initialisation, data order and dropout"
    )
    remat: Literal["none", "dots", "full", "offload"] = Field(
        default="none",
        description="what the backward pass recomputes: nothing | all but matmuls and attention "
        "| whole layers | whole layers, from inputs kept on the host",
    )
    scan_layers: bool | Literal["auto"] = Field(
        default="auto",
        description="run all layers as one loop; false writes each out: what the backward pass "
        "needs is not copied into stacks, and compiling takes longer; auto writes up to 48 layers "
        "out on NVIDIA GPUs that split none of them (docs/scan_layers.md)",
    )
    zero: Literal[0, 1] = Field(
        default=0, description="1: gradients and optimizer state are split over data (ZeRO-1)"
    )
    label_smoothing: Fraction = Field(
        default=0.0,
        description="share of the target probability that is spread evenly over the whole "
        "vocabulary",
    )
    z_loss: NonNegative = Field(
        default=0.0,
        description="weight in the loss of the squared log of the softmax's denominator (PaLM)",
    )
    preference: Literal["none", "dpo", "simpo", "orpo"] = Field(
        default="none",
        description="learns from pairs of answers, one preferred to the other "
        "(docs/preferences.md): by distance to a reference model (arXiv:2305.18290) | by mean "
        "log-probability (arXiv:2405.14734) | by odds, along with the preferred answer "
        "(arXiv:2403.07691)",
    )
    preference_beta: Positive | None = Field(
        default=None,
        description="factor of the rewards of dpo and simpo; default: 0.1 for dpo, 2 for simpo",
    )
    preference_gamma: NonNegative | None = Field(
        default=None,
        description="margin by which the reward of the preferred answer should be higher in "
        "simpo; default: 1",
    )
    preference_lambda: Positive | None = Field(
        default=None, description="weight of the odds in the loss of orpo; default: 0.1"
    )
    clip: Positive | None = Field(
        default=1.0, description="largest global gradient norm; none: no clipping"
    )
    init_from: LocalPath | None = Field(
        default=None,
        description="run whose newest weights this run starts from, or a folder of Hugging Face",
    )
    new_tokenizer: bool = Field(
        default=False,
        description="take weights of init_from that learned another tokenizer than that of the "
        "data, whose ids then stand for other texts; false: they are refused",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"train.epochs={self.epochs:g} and train.steps={self.steps} give the "
                "length twice; leave one of them out"
            )
        if self.stages and self.epochs is not None:
            raise ValueError(
                "train.stages name steps, and train.epochs counts none; set train.steps instead"
            )
        if self.new_tokenizer and self.init_from is None:
            raise ValueError("train.new_tokenizer belongs to train.init_from; leave it out")
        _ = self.timetable  # raises ValueError if the stages do not fit together
        for name in (name for name in type(self).model_fields if name.startswith("preference_")):
            theirs = [kind for kind, has in PREFERENCE_SETTINGS.items() if name in has]
            if getattr(self, name) is not None and self.preference not in theirs:
                raise ValueError(
                    f"train.{name}={getattr(self, name):g} belongs to {' and '.join(theirs)}, "
                    f"not to train.preference={self.preference!r}; leave it out"
                )
        return self

    @property
    def timetable(self) -> tuple[TimedStage, ...]:
        """The stages of the run; the last has `global_batch` and `sequence_length`."""
        return timetable(self.stages, self.global_batch, self.sequence_length)

    def stage_of(self, step: int) -> TimedStage:
        """Returns the stage of the 1-based `step`."""
        return next(stage for stage in self.timetable if stage.has(step))

    def samples_before(self, done: int) -> int:
        """Returns how many samples the first `done` steps read."""
        stage = self.stage_of(done + 1)
        return stage.samples_before + (done - stage.first) * stage.samples

    @property
    def learns_pairs(self) -> bool:
        """True if the data are pairs of answers and losses are means over pairs."""
        return self.preference != "none"

    @property
    def needs_reference(self) -> bool:
        """True if pairs need the log-probabilities of a reference model."""
        return self.preference == "dpo"

    @property
    def of_preference(self) -> dict[str, float]:
        """The settings of the preference loss, e.g. {"beta": 0.1} for dpo."""
        defaults = PREFERENCE_SETTINGS[self.preference]
        given = {name: getattr(self, name) for name in defaults}
        return {
            name.removeprefix("preference_"): default if given[name] is None else given[name]
            for name, default in defaults.items()
        }

    @model_serializer(mode="wrap")
    def _without_steps_that_are_not_counted(self, write):
        values = write(self)
        if self.epochs is not None:
            values.pop("steps", None)
        return values


class DistillConfig(Settings):
    """A second, frozen model from whose predictions this one learns (arXiv:1503.02531).

    The loss is (1 - share) x cross-entropy + share x temperature^2 x KL(teacher || student), the
    divergence of the softmax of both models' logits over the temperature (docs/distillation.md).
    """

    teacher: LocalPath | None = Field(
        default=None,
        description="the teacher: a run, whose newest weights it has, or a folder of Hugging Face",
    )
    logits: LocalPath | None = Field(
        default=None,
        description="a folder in which `spmdtrain data teach` has saved what a teacher says of the "
        "data, instead of a teacher on the mesh",
    )
    temperature: DerivedOrNone[Positive] = Field(
        default=None,
        description="divisor of the logits of both models; above 1 what the teacher finds unlikely "
        "counts more; default: 1",
    )
    share: DerivedOrNone[Share] = Field(
        default=None,
        description="share of the loss against the teacher; 1: of no other; default: 0.5",
    )

    def derived(self) -> dict[str, Any]:
        """Returns temperature and share, which only a run that learns from a teacher has."""
        return {
            "temperature": 1.0 if self.is_on else None,
            "share": 0.5 if self.is_on else None,
        }

    @property
    def is_on(self) -> bool:
        """True if the run learns from a teacher, on the mesh or by what it said."""
        return self.teacher is not None or self.logits is not None

    @property
    def asked(self) -> str:
        """The setting that names where the run learns from, with its value, for messages."""
        if self.logits is not None:
            return f"distill.logits={self.logits!r}"
        return f"distill.teacher={self.teacher!r}"

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
