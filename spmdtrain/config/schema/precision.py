"""[precision]: the dtypes of a step, and the loss scale of float16."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.settings import Count, Derived, DerivedOrNone, Settings, Strings

Float = Literal["float32", "bfloat16"]
Narrow = Literal["float8", "mxfp8"]  # the 8-bit floats of matmuls
NARROW: tuple[Narrow, ...] = get_args(Narrow)
# Microbatches whose gradients bfloat16 can sum: of 64 equal ones each changes the sum by 4 of its
# spacings, and the sum is 1 % off; of 256 it is 6 %, and of 1,024 half of it is lost.
MOST_SUMMED = 64


class PrecisionConfig(Settings):
    """The dtypes of a step."""

    compute: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="dtype of matmuls and activations; float32 is exact: no TF32; float16 scales "
        "the loss",
    )
    matmul: Literal["compute", "float8", "mxfp8"] = Field(
        default="compute",
        description="dtype of the operands of layers' matmuls and of their gradients: that of "
        "compute | 8-bit floats, e4m3, and e5m2 for gradients, scaled by each array's "
        "largest magnitude (arXiv:2209.05433) | 8-bit floats, e4m3, with a scale for each block "
        "of 32 (MXFP8, arXiv:2506.08027), on GPUs since Blackwell; attention, embeddings, norms "
        "and the head keep the dtype of compute",
    )
    scaling: Literal["current", "delayed"] = Field(
        default="current",
        description="float8 only: where the scale of values and gradients comes from: the array "
        "itself | the largest magnitude in the last scaling_history steps, so that no array is "
        "read twice; the scale of a weight always comes from the weight",
    )
    scaling_history: DerivedOrNone[Annotated[int, Field(ge=1, le=1024)]] = Field(
        default=None,
        description="delayed scaling only: number of steps whose magnitudes count; default: 16",
    )
    wide: Strings = Field(
        default=(),
        description="float8 and mxfp8 only: weights (patterns of paths, as `show` prints them) "
        "whose matmuls keep the dtype of compute",
    )
    logits: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of the logits that training takes its loss from; bfloat16 halves their "
        "memory and traffic, and rounds each by up to 2^-9 of itself",
    )
    params: Float = Field(
        default="float32", description="dtype of master weights and optimizer state"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="rounding of bfloat16 weights after an update; stochastic: unbiased, so that "
        "updates smaller than bfloat16's spacing are not lost",
    )
    frozen: Derived[Float] = Field(
        default=None,
        description="dtype in which weights that are not trained are stored; default: params",
    )
    accumulate: Float = Field(
        default="float32",
        description="dtype of gradients over microbatches and across devices; bfloat16: for at "
        f"most {MOST_SUMMED} microbatches",
    )
    loss_scale: DerivedOrNone[Annotated[float, Field(ge=1, le=2**32)]] = Field(
        default=None,
        description="float16 only: initial factor of the loss for the backward pass; it halves "
        "when a gradient overflows, and that step changes no weight; default: 65536",
    )
    loss_scale_steps: DerivedOrNone[Count] = Field(
        default=None,
        description="float16 only: consecutive steps without an overflow after which the scale "
        "doubles; default: 2000",
    )

    def check_sum(self, microbatches: int) -> None:
        """Raises ConfigError if the gradients of so many microbatches would be lost in their sum,
        which stops growing.
        """
        if self.accumulate == "bfloat16" and microbatches > MOST_SUMMED:
            raise ConfigError(
                f"precision.accumulate={self.accumulate!r} loses gradients: a sum of "
                f"{microbatches} microbatches stops growing",
                asked=f"at most {MOST_SUMMED} microbatches",
                fix="--set precision.accumulate=float32, or a larger train.microbatch",
            )

    @property
    def in_blocks(self) -> bool:
        """True if matmuls contract whole blocks of numbers, of which each has a scale."""
        return self.matmul == "mxfp8"

    def derived(self) -> dict[str, Any]:
        """Returns the dtype of frozen weights, the length of a history, and the loss scale of
        float16.
        """
        scales = self.compute == "float16"
        return {
            "frozen": self.params,
            "loss_scale": 65536.0 if scales else None,
            "loss_scale_steps": 2000 if scales else None,
            "scaling_history": 16 if self.scaling == "delayed" else None,
        }

    def affecting_numbers(self) -> dict[str, Any]:
        return self.as_given()

    @model_validator(mode="after")
    def _check(self):
        if self.logits == "bfloat16" and self.compute != "bfloat16":
            raise ValueError(
                "precision.logits='bfloat16' belongs to precision.compute='bfloat16', not to "
                f"{self.compute!r}; set precision.compute='bfloat16'"
            )
        if self.rounding == "stochastic" and self.params != "bfloat16":
            raise ValueError(
                f"precision.rounding='stochastic' belongs to bfloat16, not to {self.params!r}; "
                "set precision.params='bfloat16'"
            )
        if self.wide and self.matmul == "compute":
            raise ValueError(
                f"precision.wide={','.join(self.wide)} belongs to float8 and mxfp8, not to "
                f"{self.matmul!r}; set precision.matmul='float8'"
            )
        if self.scaling == "delayed" and self.matmul != "float8":
            raise ValueError(
                f"precision.scaling='delayed' belongs to float8, not to {self.matmul!r}; set "
                "precision.matmul='float8'"
            )
        if self.scaling_history is not None and self.scaling != "delayed":
            raise ValueError(
                f"precision.scaling_history={self.scaling_history} belongs to delayed scaling; set "
                "precision.scaling='delayed'"
            )
        for name in ("loss_scale", "loss_scale_steps"):
            value = getattr(self, name)
            if value is not None and self.compute != "float16":
                raise ValueError(
                    f"precision.{name}={value:g} belongs to float16, not to {self.compute!r}; "
                    "set precision.compute='float16'"
                )
        return self


def refusals(run: Any) -> Iterator[str]:
    """Yields a refusal of meshes on which no matmul returns the magnitudes for delayed scaling."""
    if run.precision.scaling != "delayed":
        return
    setting = "precision.scaling='delayed'"
    if run.mesh.pipeline != 1:
        yield (
            f"{setting}: the ticks of mesh.pipeline={run.mesh.pipeline} sum what a microbatch "
            "returns, and magnitudes have no sum; set precision.scaling='current'"
        )
    if run.mesh.collective_matmul:
        yield (
            f"{setting}: the pieces of mesh.collective_matmul=true are scaled by themselves; set "
            "mesh.collective_matmul=false, or precision.scaling='current'"
        )
