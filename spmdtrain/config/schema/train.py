"""[train]: the length of training, the batch, the loss, and the savings of memory."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from spmdtrain.config.schema.optimizer import ScheduleFreeAdamW
from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Fraction,
    LocalPath,
    NonNegative,
    Positive,
    Settings,
    Tokens,
)
from spmdtrain.config.stage_timetable import TimedStage, timetable

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
    """The length of training, the size of a batch, the loss, and the savings of memory."""

    of_whole_run: ClassVar = ("stages",)

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
        description="stages before these settings apply: smaller batches, shorter sequences "
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
        "out on NVIDIA GPUs that split none of them, and up to 8 on one CPU device "
        "(docs/scan_layers.md)",
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
        description="run whose newest weights this run starts from, or a Hugging Face folder",
    )
    new_tokenizer: bool = Field(
        default=False,
        description="accept weights of init_from that were trained with a different tokenizer, "
        "where the same ids stand for other texts; false: they are refused",
    )

    def other_runs(self) -> Mapping[str, str | None]:
        return {"init_from": self.init_from}

    def affecting_numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("steps", "global_batch", "clip")}

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
    def averages_answers(self) -> bool:
        """True if the loss of a pair takes the mean over the tokens of an answer, not their sum."""
        return self.preference in ("simpo", "orpo")

    @property
    def of_preference(self) -> dict[str, float]:
        """The settings of the preference loss, e.g. {"beta": 0.1} for dpo."""
        defaults = PREFERENCE_SETTINGS[self.preference]
        chosen = {name: getattr(self, name) for name in defaults}
        return {
            name.removeprefix("preference_"): default if chosen[name] is None else chosen[name]
            for name, default in defaults.items()
        }

    @model_serializer(mode="wrap")
    def _without_steps_that_are_not_counted(self, write):
        values = write(self)
        if self.epochs is not None:
            values.pop("steps", None)
        return values


def refusals_of_length(run: Any) -> Iterator[str]:
    """Yields a refusal of sequences that are longer than the model allows."""
    length, longest = run.train.sequence_length, run.model.max_length
    if length <= longest:
        return
    text = (
        f"train.sequence_length={length} is longer than model.max_length={longest}; try --set "
        f"train.sequence_length={longest}"
    )
    if run.model.positions == "rope" and not run.model.rope_scaling:
        factor = -(-length // longest)
        text = (
            f"{text}, or --set model.max_length={factor * longest} --set "
            f"model.rope_scaling.kind=yarn --set model.rope_scaling.factor={factor} --set "
            f"model.rope_scaling.original_length={longest}"
        )
    yield text


def refusals_of_memory(run: Any) -> Iterator[str]:
    """Yields the settings that save memory and do not work with the layers of a pipeline."""
    stages = run.mesh.pipeline
    if stages == 1:
        return
    if run.pipeline.schedule == "zero_bubble" and run.train.remat != "none":
        yield (
            f"train.remat={run.train.remat!r}: zero_bubble splits a layer's backward in "
            "two, which needs remat 'none'; or set pipeline.schedule='interleaved'"
        )
    if run.train.remat == "offload":
        yield (
            f"train.remat='offload': the stages of mesh.pipeline={stages} keep few "
            "layers' inputs, and keep them on the device; set train.remat='full'"
        )
    if run.train.scan_layers is False:
        yield (
            f"train.scan_layers=false: the stages of mesh.pipeline={stages} run "
            "their layers in a loop; set train.scan_layers=true"
        )


def refusals_of_pairs(run: Any) -> Iterator[str]:
    """Yields the settings that cannot be combined with pairs of answers."""
    if not run.train.learns_pairs:
        return
    setting = f"train.preference={run.train.preference!r}"
    if run.data.corpus != "tokens" or run.data.mix or run.data.packing != "best_fit":
        yield (
            f"{setting} learns from token files of pairs, each in one sequence; set "
            "data.corpus='tokens' and data.packing='best_fit', without data.mix"
        )
    if run.train.label_smoothing or run.train.z_loss:
        yield f"{setting} has no train.label_smoothing and no train.z_loss"
    if run.precision.logits != "float32":
        yield (
            f"{setting} takes its loss from logits in float32, and not as "
            f"precision.logits={run.precision.logits!r}; set precision.logits='float32'"
        )
    if run.model.further_depth:
        yield (
            f"model.multi_token does not go with {setting}, a loss of whole answers; try "
            "--set model.multi_token=none"
        )


def refusals_of_stages(run: Any) -> Iterator[str]:
    """Yields the settings that cannot be combined with stages."""
    stages = run.train.stages
    if not stages:
        return
    if run.guard.replay_check:
        yield (
            f"guard.replay_check={run.guard.replay_check} repeats one compiled step, and "
            "train.stages have several; set guard.replay_check=0"
        )
    freezes = any(stage.frozen_layers is not None for stage in stages)
    if freezes and isinstance(run.optimizer, ScheduleFreeAdamW):
        yield (
            "train.stages: the average of schedule_free_adamw would go on moving while its "
            "layer is frozen; set optimizer.name='adamw' for stages with frozen_layers"
        )
    is_short = any(stage.pieces > 1 for stage in run.train.timetable)
    if is_short and run.data.packing == "best_fit":
        yield (
            "data.packing='best_fit' cuts no documents, and a stage of train.stages with its "
            "own sequence_length would; set data.packing='documents'"
        )
