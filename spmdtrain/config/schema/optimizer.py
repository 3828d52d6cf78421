"""[optimizer]: a class for each optimizer, and groups of parameters."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Decay,
    DerivedOrNone,
    Fraction,
    NonNegative,
    Positive,
    Settings,
    Share,
)

BFLOAT16_SPACING = 2.0**-8  # half of that between two numbers, as a share of the larger one


class ParameterGroup(Settings):
    """A group of parameters that are trained differently from the rest."""

    match: str = Field(description="pattern of their paths, as printed by `show`: tokens.*, *_bias")
    rate: Positive = Field(default=1.0, description="factor of the learning rate")
    weight_decay: NonNegative | None = Field(
        default=None, description="weight decay of their matrices; default: optimizer.weight_decay"
    )
    frozen: bool = Field(
        default=False, description="not trained at all: no update, no optimizer state"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.frozen and (self.rate != 1 or self.weight_decay is not None):
            raise ValueError(f"optimizer.groups: {self.match!r} is frozen; its rate has no effect")
        return self


Groups = Annotated[tuple[ParameterGroup, ...], Field(strict=False)]


class OptimizerConfig(Settings):
    """The settings of every optimizer: weight decay, and the learning rate over steps.

    The rate warms up linearly, then stays (constant), falls to `final_learning_rate` (cosine,
    linear), or stays and falls linearly at the end (wsd: warmup, stable, decay; arXiv:2404.06395).
    """

    of_whole_run: ClassVar = ("rate_by_batch",)
    moments: ClassVar[int]  # elements of optimizer state per element of a parameter
    by_element: ClassVar[bool] = False  # its update of an element reads no other element
    has_width_rule: ClassVar[bool] = False  # of its rates, for `model.mup_base`
    gradients_at_weights: ClassVar[bool] = True  # False: at a point that a step derives from them

    learning_rate: Positive = 1e-3
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: CountOrZero = Field(default=0, description="steps from 0 to learning_rate")
    final_learning_rate: NonNegative = Field(
        default=0.0, description="learning rate at the last step (cosine, linear, wsd)"
    )
    rate_by_batch: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="how the rate follows the tokens of a batch in train.stages, with 1 for "
        "those after the last stage: not at all | in proportion (arXiv:1706.02677) | by the "
        "square root (arXiv:2205.10287)",
    )
    decay_share: DerivedOrNone[Share] = Field(
        default=None, description="share of the steps in which wsd decays; default: 0.2"
    )
    weight_decay: NonNegative = Field(
        default=0.0,
        description="weight decay of tensors with two or more dims (per layer), not of norms and "
        "biases",
    )
    ema: Decay | None = Field(
        default=None,
        description="decay of an exponential moving average of the weights, which is kept "
        "alongside them; it has a half-life of 0.69 / (1 - ema) steps (0.999: 693); "
        "none: no average",
    )
    moment_dtype: Literal["params", "bfloat16", "8bit"] = Field(
        default="params",
        description="how the moments are stored: as precision.params | bfloat16 | 8 bits with a "
        "scale for each 256 (arXiv:2110.02861), squares by their logarithm, with "
        "unbiased stochastic rounding",
    )
    memory: Literal["device", "host"] = Field(
        default="device",
        description="where the moments rest between steps: with the weights | in pinned memory "
        "of the host, from which each update streams them layer by layer (docs/offload.md)",
    )
    groups: Groups = Field(
        default=(),
        description="parameters that are trained differently; the first match counts",
    )

    def derived(self) -> dict[str, Any]:
        """Returns the share of the steps in which wsd falls; no other schedule has one."""
        return {"decay_share": 0.2 if self.schedule == "wsd" else None}

    def affecting_numbers(self) -> dict[str, Any]:
        return self.as_given()

    @model_validator(mode="after")
    def _check_moments(self):
        if self.moment_dtype == "params":
            return self
        name = getattr(self, "name", "")
        if not self.moments or not self.gradients_at_weights:
            raise ValueError(
                f"optimizer.moment_dtype={self.moment_dtype!r}: {name} keeps no separate "
                "moments; set optimizer.name='adamw'"
            )
        if self.moment_dtype == "bfloat16" and (lost := self.lost_in_bfloat16()):
            raise ValueError(
                f"optimizer.moment_dtype='bfloat16' {lost}; set optimizer.moment_dtype='8bit'"
            )
        return self

    def lost_in_bfloat16(self) -> str:
        """Returns which change moments in bfloat16 would lose in each step; empty: none."""
        for name in ("beta1", "beta2", "momentum"):
            change = 1 - getattr(self, name, 0.0)
            if change < BFLOAT16_SPACING:
                return f"loses a change of 1 - {name} = {change:.2g}, less than half its spacing"
        return ""

    @model_validator(mode="after")
    def _check_memory(self):
        if self.memory == "device":
            return self
        if not self.by_element:
            raise ValueError(
                f"optimizer.memory='host': {getattr(self, 'name', '')} is not built to be updated "
                "in parts; set optimizer.name='adamw', 'lion' or 'sgd'"
            )
        if self.moment_dtype == "8bit":
            raise ValueError(
                "optimizer.memory='host': blocks of 8 bits reach over the parts of devices; set "
                "optimizer.moment_dtype='bfloat16'"
            )
        return self

    @model_validator(mode="after")
    def _check(self):
        if self.decay_share is not None and self.schedule != "wsd":
            raise ValueError(
                f"optimizer.decay_share belongs to schedule 'wsd', not to {self.schedule!r}; "
                "set optimizer.schedule='wsd'"
            )
        return self


class AdamW(OptimizerConfig):
    moments: ClassVar[int] = 2
    by_element: ClassVar[bool] = True
    has_width_rule: ClassVar[bool] = True

    name: Literal["adamw"] = "adamw"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Positive = 1e-8


class Lion(OptimizerConfig):
    """Lion (arXiv:2302.06675), which needs a third to a tenth of AdamW's learning rate."""

    moments: ClassVar[int] = 1
    by_element: ClassVar[bool] = True
    has_width_rule: ClassVar[bool] = True

    name: Literal["lion"] = "lion"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99


class Adafactor(OptimizerConfig):
    """Adafactor (arXiv:1804.04235), which keeps the squares of large matrices by row and column,
    and no momentum.

    An update is scaled by the root mean square of its parameter: try a learning rate of 1e-2.
    """

    moments: ClassVar[int] = 0

    name: Literal["adafactor"] = "adafactor"
    decay_rate: Fraction = Field(
        default=0.8,
        description="at step n, the squares of earlier steps have weight 1 - n^-decay_rate",
    )
    clip_update: Positive = Field(default=1.0, description="largest root mean square of an update")


class Lamb(OptimizerConfig):
    """LAMB (arXiv:1904.00962), for large batches: AdamW with each update scaled to the norm of its
    matrix.
    """

    moments: ClassVar[int] = 2

    name: Literal["lamb"] = "lamb"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-6


class Muon(OptimizerConfig):
    """Muon: orthogonalised momentum for the matrices of layers, AdamW for tables, norms and biases.

    Updates of both have the same size (arXiv:2502.16982), so AdamW's learning rate suits both.
    """

    moments: ClassVar[int] = 1  # of the matrices
    has_width_rule: ClassVar[bool] = True

    name: Literal["muon"] = "muon"
    momentum: Fraction = Field(default=0.95, description="of the matrices")
    beta1: Fraction = Field(default=0.9, description="of AdamW")
    beta2: Fraction = Field(default=0.95, description="of AdamW")
    epsilon: Positive = Field(default=1e-8, description="of AdamW")


class ScheduleFreeAdamW(OptimizerConfig):
    """Schedule-free AdamW (arXiv:2405.15682): an average of the weights replaces a falling rate.

    Evaluations, samples and checkpoints use the average.

    The training loss is that of a point near it, where gradients are taken. It needs a warm-up,
    like AdamW; then the rate stays constant.
    """

    moments: ClassVar[int] = 2
    gradients_at_weights: ClassVar[bool] = False

    name: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="constant", description="constant: the average replaces a decay"
    )
    beta1: Fraction = Field(
        default=0.9,
        description="where gradients are taken, from the newest point (0) to the average (1)",
    )
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-8

    @model_validator(mode="after")
    def _stays_constant(self):
        if self.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule={self.schedule!r}: the average of schedule_free_adamw "
                "replaces a falling rate; set optimizer.schedule='constant'"
            )
        return self


class Sgd(OptimizerConfig):
    moments: ClassVar[int] = 1
    by_element: ClassVar[bool] = True

    name: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9


class Soap(OptimizerConfig):
    """SOAP (arXiv:2409.11321): Adam in the eigenbases of the gradients of each matrix of a layer,
    AdamW for tables, norms and biases.

    Beside the two moments of a matrix it keeps two factors and two bases, squares of its rows and
    columns: four times the weights if it is square.
    """

    moments: ClassVar[int] = 6  # of a square matrix

    name: Literal["soap"] = "soap"
    beta1: Fraction = 0.95
    beta2: Fraction = 0.95
    epsilon: Positive = 1e-8
    basis_every: Count = Field(
        default=10, description="steps from one refresh of the bases to the next"
    )
    basis_beta: Fraction = Field(
        default=0.95,
        description="decay of the means of products of gradients, whose eigenvectors the bases "
        "follow",
    )
    basis_largest: Count = Field(
        default=10_000,
        description="most rows or columns of a matrix that have a basis; a longer side has none",
    )


def refusals(run: Any) -> Iterator[str]:
    """Yields refusals of rates that rise at the end, and of weights too narrow for an average."""
    if run.optimizer.final_learning_rate > run.optimizer.learning_rate:
        yield "optimizer.final_learning_rate is above optimizer.learning_rate"
    narrow = run.precision.params
    if isinstance(run.optimizer, ScheduleFreeAdamW) and narrow != "float32":
        yield (
            f"precision.params={narrow!r}: an average of n steps moves by 1 / n, which rounds "
            "to nothing there; set precision.params='float32' for schedule_free_adamw"
        )
        return
    rest_alike = run.optimizer.moments and run.optimizer.moment_dtype == "params"
    if narrow != "float32" and rest_alike and (lost := run.optimizer.lost_in_bfloat16()):
        yield (
            f"precision.params={narrow!r}, in which the moments of {run.optimizer.name} rest, "
            f"{lost}; set optimizer.moment_dtype='8bit'"
        )


def refusals_of_batches(run: Any) -> Iterator[str]:
    """Yields why a rate cannot follow the size of a batch."""
    follows = run.optimizer.rate_by_batch
    if follows == "none":
        return
    if not run.train.stages:
        yield (
            f"optimizer.rate_by_batch={follows!r} needs batches of several sizes; add "
            "[[train.stages]]"
        )
    if run.own.learning_rate is not None:
        yield (
            f"optimizer.rate_by_batch={follows!r} does not change the rate of "
            "own.learning_rate; set optimizer.rate_by_batch='none'"
        )


def refusals_of_steps(run: Any) -> Iterator[str]:
    """Yields a refusal of a warm-up that is longer than `train.steps`."""
    warmup = run.optimizer.warmup
    if warmup > run.train.steps:
        yield f"optimizer.warmup={warmup} is longer than train.steps={run.train.steps}"
