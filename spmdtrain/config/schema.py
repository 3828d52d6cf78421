"""Every setting of a run: typed, frozen, each with its unit and meaning beside it.

A class checks what can be known from its own section, `RunConfig` what can be known from several
sections together. What depends on the machine (devices, files) is checked where the config meets
it. Nothing here imports jax, so that `--help` and a typo cost milliseconds.

Descriptions are read by people: they stand in the JSON schema and in the list of settings.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.given import as_whole, check_kind
from spmdtrain.config.near import did_you_mean
from spmdtrain.config.refusal import refusal_in_python

Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def _in_float32(value: float) -> float:
    """Refuse what would become 0 or infinite on devices, which compute in float32."""
    if value and not 1.2e-38 <= value <= 3.4e38:
        raise PydanticCustomError("float32_range", "in the range of float32, 1.2e-38 to 3.4e38")
    return value


Positive = Annotated[PositiveFloat, AfterValidator(_in_float32)]
NonNegative = Annotated[NonNegativeFloat, AfterValidator(_in_float32)]
Decay = Annotated[float, Field(gt=0, lt=1), AfterValidator(_in_float32)]
Float = Literal["float32", "bfloat16"]
Attention = Literal["auto", "xla", "triton", "mosaic", "cudnn"]
# Devices count with int32, steps and elements of a dim alike.
Count = Annotated[int, Field(gt=0, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
SEEDS = 2**32  # jax makes keys of 32 bits: a larger seed would be another one's double
# TOML has lists only, hence not strict about the container; what is in it stays strict.
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Steps = Annotated[tuple[Count, ...], Field(strict=False)]
Sinks = Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)]


class _InOneLine(type(BaseModel)):
    """Makes `TrainConfig(steps=0)` in Python a ConfigError of one line, as in a file."""

    if not TYPE_CHECKING:

        def __call__(cls, *sections, **values):
            if sections:
                raise ConfigError(f"{cls.__name__} takes keywords only", fix=f"{cls.__name__}(...)")
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise refusal_in_python(cls.__name__, cls.model_fields, error) from None


class Settings(BaseModel, metaclass=_InOneLine):
    """Base of all sections: frozen; refuses unknown keys, and does not convert TOML's types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TransformerConfig(Settings):
    """A decoder-only transformer.

    `name` picks a family, which is a set of defaults; every field may be set in any family.
    """

    layers: Count = 4
    embed: Count = Field(default=128, description="width of the residual stream")
    heads: Count = Field(default=4, description="query heads")
    kv_heads: Count | None = Field(
        default=None, description="key and value heads (GQA); default: heads"
    )
    head_dim: Count | None = Field(default=None, description="default: embed / heads")
    ffn: Count | None = Field(
        default=None, description="hidden width of the mlp; default: 4 embed, swiglu 8/3 embed"
    )
    vocab: Count | None = Field(
        default=None, description="rows of the embedding; default: what the tokenizer has"
    )
    max_length: Count | None = Field(
        default=None, description="longest sequence; default: train.sequence_length"
    )
    positions: Literal["learned", "rope"]
    norm: Literal["layernorm", "rmsnorm"]
    mlp: Literal["gelu", "swiglu"]
    bias: bool = Field(description="biases in linear layers and layernorm")
    tied: bool = Field(description="one matrix for embedding and head")
    dropout: Fraction = 0.0
    attention: Attention = Field(
        default="auto",
        description="its implementation; auto: the fastest measured that can; "
        "a named one never falls back",
    )
    rope_theta: Positive = 10_000.0
    norm_epsilon: Positive = 1e-5
    make: str | None = Field(
        default=None,
        description="a model of one's own in the place of the shipped one: "
        "FILE.py:CLASS or package.module:CLASS",
    )
    extra: dict[str, Any] = Field(
        default={}, description="settings of that model, which its class types"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.head_dim is None and self.embed % self.heads:
            raise ValueError(
                f"model.embed={self.embed} is not divisible by model.heads={self.heads}; "
                "set model.head_dim"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}"
            )
        if self.positions == "rope" and self.width_per_head % 2:
            raise ValueError(
                f"model.head_dim={self.width_per_head}: rope turns pairs, so it must be even"
            )
        return self

    # A field of None takes its default from other fields: use these, not the fields.

    @property
    def width_per_head(self) -> int:
        """Channels of one head of attention: `head_dim`, or else `embed / heads`."""
        return self.head_dim or self.embed // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: `kv_heads`, or else as many as `heads`."""
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        """Hidden width of the mlp: `ffn`, or else 4 embed, and for swiglu 8/3 embed, rounded up
        to a multiple of 64."""
        if self.ffn:
            return self.ffn
        if self.mlp == "gelu":
            return 4 * self.embed
        return -(-8 * self.embed // 3 // 64) * 64


class GPT(TransformerConfig):
    """GPT-2: learned positions, layernorm, gelu, biases, tied head."""

    name: Literal["gpt"] = "gpt"
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = True


class Llama(TransformerConfig):
    """Llama: rotary positions, RMSNorm, SwiGLU, no biases, untied head."""

    name: Literal["llama"] = "llama"
    positions: Literal["learned", "rope"] = "rope"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False
    tied: bool = False


# Slowest link first.
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


class MeshConfig(Settings):
    """Devices along each mesh axis, slowest link first; their product is the device count.

    1 switches an axis off. One axis may be -1: it takes all devices that are left.
    """

    pipeline: int = Field(default=1, description="layers are split into stages")
    data: int = Field(default=1, description="batch is split, parameters are copied")
    fsdp: int = Field(default=1, description="batch is split, parameters are split too (ZeRO-3)")
    expert: int = Field(default=1, description="batch is split; experts of a mixture are spread")
    context: int = Field(default=1, description="sequence is split")
    tensor: int = Field(
        default=1, description="heads, ffn and vocabulary are split; wants the fastest links"
    )
    collective_matmul: bool = Field(
        default=False,
        description="matmuls over tensor run in pieces, beside the tokens that they gather or "
        "scatter; wants rules.activations.stream_time = context,tensor",
    )
    elastic: bool = Field(
        default=True,
        description="a run that is resumed on another number of devices takes other sizes of data "
        "and fsdp; global batch and order of the samples stay",
    )

    @model_validator(mode="after")
    def _check(self):
        sizes = self.sizes
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(
                    f"mesh.{axis}={size}: an axis spans at least 1 device (or -1: fill)"
                )
        filled = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
        if len(filled) > 1:
            raise ValueError(f"{' and '.join(filled)} are both -1; only one axis can be filled")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """The devices along each axis, in mesh order (slowest link first)."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class PipelineConfig(Settings):
    """The order of the stages' work. Read only where mesh.pipeline gives several stages."""

    schedule: str = Field(
        default="1f1b",
        description="gpipe | 1f1b | interleaved | zero_bubble | "
        "a .json or .csv file, as `spmdtrain schedule` writes",
    )
    chunks: Count = Field(
        default=1,
        description="runs of layers per stage, each a 1 / chunks of its layers "
        "(interleaved, zero_bubble)",
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


class TrainConfig(Settings):
    """The length of training, the size of a batch, the loss, and what saves memory."""

    steps: Count = Field(
        default=1000, description="optimizer steps in all; raising it and resuming goes on"
    )
    epochs: Positive | None = Field(
        default=None,
        description="takes the place of train.steps: as many as read the training data so often, "
        "rounded up; not for mixtures",
    )
    global_batch: Count = Field(default=16, description="sequences per step over all devices")
    microbatch: Count | None = Field(
        default=None,
        description="sequences per batch shard at once; default: all of them, i.e. no accumulation",
    )
    sequence_length: Count = Field(default=128, description="tokens per sequence")
    seed: int = Field(
        default=0, ge=0, lt=SEEDS, description="of initialisation, data order and dropout"
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="none",
        description="what backward recomputes: "
        "nothing | all but matmuls and attention | whole layers",
    )
    zero: Literal[0, 1] = Field(
        default=0, description="1: gradients and optimizer state split over data (ZeRO-1)"
    )
    label_smoothing: Fraction = Field(
        default=0.0,
        description="share of the target probability that lies evenly on the whole vocabulary",
    )
    z_loss: NonNegative = Field(
        default=0.0,
        description="weight of the squared log of the softmax's denominator in the loss (PaLM)",
    )
    clip: Positive | None = Field(
        default=1.0, description="largest global gradient norm; none: no clipping"
    )
    init_from: str | None = Field(
        default=None, description="run directory whose newest weights start this run"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"train.epochs={self.epochs:g} and train.steps={self.steps} are one "
                "length said twice; leave one of them out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_steps_that_are_not_counted(self, write):
        values = write(self)
        if self.epochs is not None:
            values.pop("steps", None)
        return values


class ParameterGroup(Settings):
    """Parameters that are trained otherwise than the rest."""

    match: str = Field(
        description="pattern of their paths, as `show` prints them: tokens.*, *_bias"
    )
    rate: Positive = Field(default=1.0, description="times the learning rate")
    weight_decay: NonNegative | None = Field(
        default=None, description="of their matrices; default: optimizer.weight_decay"
    )
    frozen: bool = Field(
        default=False, description="not trained at all: no update, no optimizer state"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.frozen and (self.rate != 1 or self.weight_decay is not None):
            raise ValueError(f"optimizer.groups: {self.match!r} is frozen; its rate does nothing")
        return self


Groups = Annotated[tuple[ParameterGroup, ...], Field(strict=False)]


class OptimizerConfig(Settings):
    """The settings of every optimizer: weight decay, and the learning rate over steps.

    The rate warms up linearly, then stays (constant), falls to `final_learning_rate` (cosine,
    linear), or stays and falls linearly at the end (wsd: warmup, stable, decay; arXiv:2404.06395).
    """

    moments: ClassVar[int]  # elements of optimizer state per element of a parameter
    gradients_at_weights: ClassVar[bool] = True  # False: at a point that a step derives from them

    learning_rate: Positive = 1e-3
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: CountOrZero = Field(default=0, description="steps from 0 to learning_rate")
    final_learning_rate: NonNegative = Field(
        default=0.0, description="at the last step (cosine, linear, wsd)"
    )
    decay_share: Share | None = Field(
        default=None, description="share of the steps in which wsd falls; default: 0.2"
    )
    weight_decay: NonNegative = Field(
        default=0.0,
        description="on tensors of two and more dims (one layer's), not on norms and biases",
    )
    ema: Decay | None = Field(
        default=None,
        description="decay of an exponential moving average of the weights, which is kept beside "
        "them: a weight counts half after 0.69 / (1 - ema) steps (0.999: 693); none: no average",
    )
    groups: Groups = Field(
        default=(),
        description="parameters that are trained otherwise; the first that matches counts",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.decay_share is not None and self.schedule != "wsd":
            raise ValueError(
                f"optimizer.decay_share is of schedule 'wsd', not of {self.schedule!r}; "
                "set optimizer.schedule='wsd'"
            )
        return self

    @property
    def falling_share(self) -> float:
        """The share of the steps in which the schedule wsd falls."""
        return 0.2 if self.decay_share is None else self.decay_share


class AdamW(OptimizerConfig):
    moments: ClassVar[int] = 2

    name: Literal["adamw"] = "adamw"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Positive = 1e-8


class Lion(OptimizerConfig):
    """arXiv:2302.06675: wants a third to a tenth of AdamW's learning rate."""

    moments: ClassVar[int] = 1

    name: Literal["lion"] = "lion"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99


class Adafactor(OptimizerConfig):
    """arXiv:1804.04235: squares of large matrices by row and column, and no momentum.

    An update is scaled by the root mean square of its parameter: try a learning rate of 1e-2.
    """

    moments: ClassVar[int] = 0

    name: Literal["adafactor"] = "adafactor"
    decay_rate: Fraction = Field(
        default=0.8, description="after n steps an older square counts 1 - n^-decay_rate"
    )
    clip_update: Positive = Field(default=1.0, description="largest root mean square of an update")


class Lamb(OptimizerConfig):
    """arXiv:1904.00962, for large batches: AdamW, whose update of a matrix is as long as it."""

    moments: ClassVar[int] = 2

    name: Literal["lamb"] = "lamb"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-6


class Muon(OptimizerConfig):
    """Orthogonalised momentum for the matrices of layers, AdamW for tables, norms and biases.

    Updates of both are of one size (arXiv:2502.16982), so AdamW's learning rate is right for both.
    """

    moments: ClassVar[int] = 1  # of the matrices

    name: Literal["muon"] = "muon"
    momentum: Fraction = Field(default=0.95, description="of the matrices")
    beta1: Fraction = Field(default=0.9, description="of AdamW")
    beta2: Fraction = Field(default=0.95, description="of AdamW")
    epsilon: Positive = Field(default=1e-8, description="of AdamW")


class ScheduleFreeAdamW(OptimizerConfig):
    """arXiv:2405.15682: AdamW whose weights are an average, in the place of a falling rate.

    Evaluations, samples and checkpoints have the average. The training loss is that of a point near
    it, where gradients are taken. A warm-up is needed as with AdamW; the rate stays constant.
    """

    moments: ClassVar[int] = 2
    gradients_at_weights: ClassVar[bool] = False

    name: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="constant", description="constant: the average takes the place of a fall"
    )
    beta1: Fraction = Field(
        default=0.9,
        description="gradients are taken so far from the newest point (0) to the average (1)",
    )
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-8

    @model_validator(mode="after")
    def _stays_constant(self):
        if self.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule={self.schedule!r}: the average of schedule_free_adamw takes "
                "the place of a falling rate; set optimizer.schedule='constant'"
            )
        return self


class Sgd(OptimizerConfig):
    moments: ClassVar[int] = 1

    name: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9


class PrecisionConfig(Settings):
    """The dtypes of a step."""

    compute: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="matmuls and activations; float32 is exact: no TF32; float16 scales the loss",
    )
    params: Float = Field(default="float32", description="master weights and optimizer state")
    accumulate: Float = Field(
        default="float32", description="gradients over microbatches and across devices"
    )
    loss_scale: Annotated[float, Field(ge=1, le=2**32)] | None = Field(
        default=None,
        description="of float16: what the loss is first multiplied by for the backward pass; it "
        "halves where a gradient overflows, and that step changes no weight; default: 65536",
    )
    loss_scale_steps: Count | None = Field(
        default=None,
        description="of float16: steps without an overflow, one after the other, after which the "
        "scale doubles; default: 2000",
    )

    @model_validator(mode="after")
    def _check(self):
        for name in ("loss_scale", "loss_scale_steps"):
            value = getattr(self, name)
            if value is not None and self.compute != "float16":
                raise ValueError(
                    f"precision.{name}={value:g} is of float16, not of {self.compute!r}; "
                    "set precision.compute='float16'"
                )
        return self

    @property
    def first_loss_scale(self) -> float:
        """The scale of the loss at the first step in float16."""
        return self.loss_scale or 65536.0

    @property
    def steps_per_loss_scale(self) -> int:
        """Steps without an overflow after which the scale doubles."""
        return self.loss_scale_steps or 2000


class MixSource(Settings):
    """One source of a mixture: token files, which must have one tokenizer with the others."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = Field(
        description="letters, digits, _ and -; its losses are loss/NAME and eval_loss/NAME"
    )
    path: str | Strings = Field(description="files or globs, .bin")
    weight: Positive = Field(
        default=1.0, description="share of the samples, beside the others' weights"
    )


Mix = Annotated[tuple[MixSource, ...], Field(strict=False)]


class DataConfig(Settings):
    """The data that a run trains on, and how it is cut into sequences."""

    corpus: Literal["stdlib", "synthetic", "text", "tokens"] = Field(
        default="stdlib",
        description="Python's own library source | seeded noise with structure | "
        "text files | token files",
    )
    path: str | Strings | None = Field(
        default=None, description="files or globs (text), .bin (tokens)"
    )
    validation_path: str | Strings | None = Field(
        default=None, description="token files to validate on, in place of validation_fraction"
    )
    mix: Mix = Field(
        default=(), description="sources of token files with weights, in place of corpus and path"
    )
    tokenizer: str = Field(
        default="bytes", description="bytes | characters | a Hugging Face tokenizer.json"
    )
    dtype: Literal["uint16", "uint32"] | None = Field(
        default=None,
        description="of the ids in .bin files that do not say it; "
        "by default the smallest that holds the vocabulary",
    )
    validation_fraction: Fraction = Field(
        default=0.1, description="tail of the token stream kept for evaluation"
    )
    shuffle: bool = True
    packing: Literal["stream", "documents", "best_fit"] = Field(
        default="stream",
        description="stream: attend across document ends | "
        "documents: segments, positions reset, no loss across | "
        "best_fit: the same, and no document is cut that fits into a sequence; the rest is padding",
    )
    read_ahead: Count = Field(
        default=4, description="batches made ahead of the step, which a disk may then keep waiting"
    )

    @model_validator(mode="before")
    @classmethod
    def _mix_is_of_tokens(cls, values):
        if isinstance(values, dict) and values.get("mix") and "corpus" not in values:
            return values | {"corpus": "tokens"}
        return values

    @model_validator(mode="after")
    def _check(self):
        if self.mix:
            self._check_mix()
        elif self.corpus in ("text", "tokens") and not self.path:
            raise ValueError(f"data.path is needed for data.corpus={self.corpus!r}")
        if self.corpus in ("stdlib", "synthetic") and self.path:
            raise ValueError(
                f"data.path={self.path!r} is not read by data.corpus={self.corpus!r}; "
                "set data.corpus='text'"
            )
        if self.dtype and self.corpus != "tokens":
            raise ValueError(
                f"data.dtype={self.dtype!r} is that of token files, with data.corpus='tokens'"
            )
        if self.validation_path and (self.corpus != "tokens" or self.mix):
            raise ValueError(
                f"data.validation_path={self.validation_path!r} is read beside data.path alone, "
                "with data.corpus='tokens'"
            )
        return self

    def _check_mix(self):
        if self.corpus != "tokens":
            raise ValueError(
                f"data.corpus={self.corpus!r}: data.mix has sources of token files; "
                "set data.mix=[] to do without"
            )
        if self.path:
            raise ValueError(
                f"data.path={self.path!r} is not read beside data.mix; "
                "set data.mix=[] to do without, or add it there as a source"
            )
        names = [source.name for source in self.mix]
        if len(set(names)) < len(names):
            raise ValueError(f"data.mix has two sources of one name: {', '.join(names)}")


class EvalConfig(Settings):
    """The interval between evaluations, and how much of the validation split they use."""

    every: CountOrZero = Field(
        default=0, description="steps between evaluations, and once at the end; 0: never"
    )
    batches: Count | None = Field(
        default=None,
        description="validation batches of train.global_batch windows; default: the whole split",
    )
    at_start: bool = Field(default=False, description="evaluate before the first step too")
    patience: Count | None = Field(
        default=None,
        description="evaluations in a row without a better eval_loss after which the run stops; "
        "default: it goes on",
    )
    min_delta: NonNegative = Field(
        default=0.0, description="nats by which a better eval_loss is at least below the best one"
    )

    @model_validator(mode="after")
    def _check(self):
        for name in ("at_start", "patience"):
            if getattr(self, name) and not self.every:
                raise ValueError(
                    f"eval.{name} needs evaluations, and eval.every=0 asks for none; set eval.every"
                )
        if self.min_delta and not self.patience:
            raise ValueError(
                f"eval.min_delta={self.min_delta:g} says nothing without eval.patience"
            )
        return self


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


class GuardConfig(Settings):
    """The response to a bad step: one whose loss or gradient is not finite, or too large."""

    policy: Literal["abort", "skip", "rollback"] = Field(
        default="abort",
        description="abort: the run ends with exit code 9, before it saves | "
        "skip: weights and optimizer state stay as they are, and the next batch follows | "
        "rollback: skip, and after most_skipped go back to the last good checkpoint, and leave out "
        "the samples since then",
    )
    grad_norm: Positive | None = Field(
        default=None,
        description="a larger gradient norm, before clipping, is too large; none: any finite one "
        "will do",
    )
    sigmas: NonNegative | None = Field(
        default=None,
        description="a loss or gradient norm so many standard deviations above the mean of the "
        "last good steps is too large; 0: none is; default: 6 (skip, rollback), 0 (abort)",
    )
    window: Annotated[int, Field(ge=2, lt=2**20)] | None = Field(
        default=None,
        description="the last good steps that sigmas counts from; half of them must be there; "
        "default: 128",
    )
    replica_check: CountOrZero = Field(
        default=0,
        description="steps between comparisons of the copies of weights and optimizer state that "
        "several devices hold, and before each save; one whose bits differ is named, and the run "
        "ends with exit code 11; 0: never",
    )
    most_skipped: Count = Field(
        default=10,
        description="steps skipped one after the other; at one more the run aborts (skip) or goes "
        "back (rollback)",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.window is not None and not self.judges_spikes:
            raise ValueError(
                f"guard.window={self.window} is of guard.sigmas, which is 0; set guard.sigmas=6"
            )
        return self

    # Fields of None take their default from the policy: use these, not the fields.

    @property
    def deviations(self) -> float:
        """Standard deviations above the mean at which a step is a spike; 0: none is."""
        if self.sigmas is None:
            return 0.0 if self.policy == "abort" else 6.0
        return self.sigmas

    @property
    def judges_spikes(self) -> bool:
        """True if a step is compared with the good steps before it."""
        return self.deviations > 0

    @property
    def steps_judged(self) -> int:
        """Good steps that a spike is judged by."""
        return self.window or 128

    @property
    def in_step(self) -> bool:
        """True if the compiled step judges itself, and keeps the weights from before a bad step."""
        return self.policy != "abort" or self.judges_spikes


class LogConfig(Settings):
    """The reports of a run: log lines, profiler traces, and sinks for its figures."""

    every: Count = Field(default=10, description="steps between lines of figures")
    profile: Steps = Field(default=(), description="steps traced by the profiler into RUN/profile")
    sinks: Sinks = Field(
        default=(),
        description="where figures go beside metrics.jsonl: "
        "tensorboard (RUN/tensorboard), wandb (RUN/wandb)",
    )


class RulesConfig(Settings):
    """Overrides of the sharding rules: logical axis -> mesh axes.

    A new name adds a rule, for models with logical axes of their own.
    """

    parameters: dict[str, Strings] = {}
    activations: dict[str, Strings] = {}


class RunConfig(Settings):
    """All settings of one run."""

    model: Annotated[GPT | Llama, Field(discriminator="name")] = GPT()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: TrainConfig = TrainConfig()
    optimizer: Annotated[
        Adafactor | AdamW | Lamb | Lion | Muon | ScheduleFreeAdamW | Sgd,
        Field(discriminator="name"),
    ] = AdamW()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()
    rules: RulesConfig = RulesConfig()

    _origin: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    if TYPE_CHECKING:
        # Pydantic also takes a section as the table that a TOML file would have.
        def __init__(self, **sections: Settings | Mapping[str, Any]) -> None: ...

    @property
    def origin(self) -> dict[str, str]:
        """Maps dotted keys to the origin of their values: a file name, or `--set`.

        A key that is absent has its default.
        """
        return self._origin

    @property
    def notes(self) -> list[str]:
        """Lists what loading changed; a run reports it."""
        return self._notes

    @property
    def vocab(self) -> int:
        """`model.vocab`, which must be set: by the config, or by `with_vocab`."""
        if self.model.vocab is None:
            raise ValueError("model.vocab is not set yet; config.with_vocab(...)")
        return self.model.vocab

    @property
    def judges_steps(self) -> bool:
        """True if the compiled step judges itself: after a bad one the weights are as before."""
        return self.guard.in_step or self.precision.compute == "float16"

    def with_vocab(self, vocab: int) -> "RunConfig":
        """Return the same run with `model.vocab` set, as the tokenizer says."""
        vocab = as_whole(vocab, "vocab", 1, 2**31 - 1)
        return self.model_copy(update={"model": self.model.model_copy(update={"vocab": vocab})})

    def with_steps(self, steps: int) -> "RunConfig":
        """Return the same run with `train.steps` in the place of `train.epochs`.

        Raises ValueError where other settings speak of steps that there are not.
        """
        train = self.train.model_copy(update={"steps": steps, "epochs": None})
        counted = self.model_copy(update={"train": train})
        where = self._origin.get("train.epochs", "Python")
        others = {key: of for key, of in self._origin.items() if key != "train.epochs"}
        counted._origin = others | {"train.steps": f"train.epochs={self.train.epochs:g} of {where}"}
        counted._notes = [*self._notes]
        counted._check_steps()
        return counted

    @property
    def eval_windows(self) -> int | None:
        """The windows of each validation split that an evaluation takes; None: all of them."""
        batches = self.eval.batches
        return None if batches is None else batches * self.train.global_batch

    @property
    def max_length(self) -> int:
        """The longest sequence that the model takes: `model.max_length`, or that of training."""
        return self.model.max_length or self.train.sequence_length

    @model_validator(mode="after")
    def _check(self):
        length = self.train.sequence_length
        if length > self.max_length:
            raise ValueError(
                f"train.sequence_length={length} is longer than model.max_length={self.max_length}"
            )
        splits_backward = self.mesh.pipeline != 1 and self.pipeline.schedule == "zero_bubble"
        if splits_backward and self.train.remat != "none":
            raise ValueError(
                f"train.remat={self.train.remat!r}: zero_bubble takes a layer's backward apart, "
                "which needs remat 'none'; or set pipeline.schedule='interleaved'"
            )
        if self.guard.policy == "rollback" and self.checkpoint.every == 0:
            raise ValueError(
                "guard.policy='rollback' goes back to a checkpoint, and checkpoint.every=0 saves "
                "none on the way; set checkpoint.every='auto'"
            )
        if (self.checkpoint.keep == "best" or self.checkpoint.keep_best) and not self.eval.every:
            raise ValueError(
                "the best checkpoints are those with the lowest eval_loss, and eval.every=0 "
                "evaluates never; set eval.every=100"
            )
        if self.train.epochs is None:
            self._check_steps()
        if self.optimizer.final_learning_rate > self.optimizer.learning_rate:
            raise ValueError("optimizer.final_learning_rate is above optimizer.learning_rate")
        narrow = self.precision.params
        if isinstance(self.optimizer, ScheduleFreeAdamW) and narrow != "float32":
            raise ValueError(
                f"precision.params={narrow!r}: an average of n steps moves by 1 / n, which rounds "
                "to nothing there; set precision.params='float32' for schedule_free_adamw"
            )
        return self

    def _check_steps(self) -> None:
        """Refuses what does not fit into `train.steps`."""
        warmup = self.optimizer.warmup
        if warmup > self.train.steps:
            raise ValueError(
                f"optimizer.warmup={warmup} is longer than train.steps={self.train.steps}"
            )
        late = [step for step in self.log.profile if step > self.train.steps]
        if late:
            raise ValueError(f"log.profile={late} lies beyond train.steps={self.train.steps}")


def check_config(config: Any) -> None:
    """Raise ConfigError where a caller gives something else for the settings of a run."""
    check_kind(config, RunConfig, "config", "st.load(FILE) or st.RunConfig(...)")
