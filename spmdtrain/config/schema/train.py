"""[train]: the length of training, the batch, the loss, and what saves memory."""

from typing import Literal

from pydantic import Field, model_serializer, model_validator

from spmdtrain.config.settings import Count, Fraction, NonNegative, Positive, Settings

SEEDS = 2**32  # jax makes keys of 32 bits: a larger seed would collide with a smaller one


class TrainConfig(Settings):
    """The length of training, the size of a batch, the loss, and what saves memory."""

    steps: Count = Field(
        default=1000, description="optimizer steps in total; raise it and resume to train on"
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
    seed: int = Field(
        default=0, ge=0, lt=SEEDS, description="seed of initialisation, data order and dropout"
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="none",
        description="what backward recomputes: "
        "nothing | all but matmuls and attention | whole layers",
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
        description="weight of the squared log of the softmax's denominator in the loss (PaLM)",
    )
    preference: Literal["none", "dpo"] = Field(
        default="none",
        description="dpo: learns from pairs of answers, one preferred to the other, by direct "
        "preference optimization; the data are pairs (docs/preferences.md)",
    )
    preference_beta: Positive = Field(
        default=0.1, description="weight of the distance to the reference model in DPO's reward"
    )
    clip: Positive | None = Field(
        default=1.0, description="largest global gradient norm; none: no clipping"
    )
    init_from: str | None = Field(
        default=None,
        description="run whose newest weights this run starts from, or a folder of Hugging Face",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"train.epochs={self.epochs:g} and train.steps={self.steps} give the "
                "length twice; leave one of them out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_steps_that_are_not_counted(self, write):
        values = write(self)
        if self.epochs is not None:
            values.pop("steps", None)
        return values
