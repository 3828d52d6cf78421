"""[finetune]: which weights of a model are trained, and with which adapters."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Fraction,
    Positive,
    Settings,
    Strings,
)

# The linear layers of a shipped block: of attention and of the gated delta rule, which has those
# behind "out" as well; of other mixers ("in"), and of the mlp.
LINEAR = ("q", "k", "v", "out", "z", "rate", "decay", "in", "gate", "up", "down")
# The default of runs that were written before there were other mixers than attention.
OF_ATTENTION = ("q", "k", "v", "out", "gate", "up", "down")


class FinetuneConfig(Settings):
    """The weights that are trained: all, those of the upper layers, or small adapters of a frozen
    model.
    """

    of_no_array: ClassVar = ("alpha", "rank_stabilised", "dropout")

    kind: Literal["full", "lora", "dora"] = Field(
        default="full",
        description="all weights | a low-rank product added to each frozen matrix "
        "(arXiv:2106.09685) | the same, with the norm of each row learned separately "
        "(arXiv:2402.09353)",
    )
    frozen_layers: CountOrZero = Field(
        default=0,
        description="number of first layers that are frozen, together with the weights that only "
        "embed tokens; they keep no activations and have no backward pass",
    )
    rank: Count = Field(default=16, description="rank of an adapter's product")
    alpha: Positive = Field(
        default=32.0, description="an adapter's product is multiplied by alpha / rank"
    )
    rank_stabilised: bool = Field(
        default=False, description="multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)"
    )
    targets: Strings = Field(
        default=LINEAR,
        description="linear layers of a block that get an adapter; in a custom model patterns of "
        "their paths, as `show` prints them",
    )
    base: Literal["float", "int8", "nf4"] = Field(
        default="float",
        description="how adapted weights are stored: as precision.frozen says | in 8 bits, with "
        "a scale for each output | in NF4, in blocks of 64, 4.1 bits "
        "(arXiv:2305.14314)",
    )
    dropout: Fraction = Field(default=0.0, description="dropout of an adapter's input")
    also_train: Strings = Field(
        default=(), description="patterns of paths of further weights that are trained in full"
    )

    def affecting_numbers(self) -> dict[str, Any]:
        return {"dropout": self.dropout} if self.dropout else {}

    @model_validator(mode="after")
    def _check(self):
        if self.kind == "full":
            for name, field in type(self).model_fields.items():
                if name == "targets" and self.targets == OF_ATTENTION:
                    continue
                if name != "frozen_layers" and getattr(self, name) != field.default:
                    raise ValueError(
                        f"finetune.{name}={getattr(self, name)!r} only applies to adapters, and "
                        "finetune.kind='full' trains all weights; set finetune.kind='lora'"
                    )
        elif not self.targets:
            raise ValueError(
                "finetune.targets is empty, so there would be no adapter; set "
                f"finetune.targets={','.join(LINEAR)}"
            )
        return self

    @property
    def has_adapters(self) -> bool:
        """True if adapters are trained, and the weights that they belong to are frozen."""
        return self.kind != "full"

    @property
    def scale(self) -> float:
        """The factor by which an adapter's product is multiplied."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


def frozen_by_setting(run: Any) -> dict[str, int]:
    """Returns setting -> number of frozen layers, without those of 0."""
    numbers: dict[str, int | None] = {
        f"train.stages[{number}].frozen_layers": stage.frozen_layers
        for number, stage in enumerate(run.train.stages)
    }
    numbers["finetune.frozen_layers"] = run.finetune.frozen_layers
    return {setting: frozen for setting, frozen in numbers.items() if frozen}


def refusals(run: Any) -> Iterator[str]:
    """Yields the settings that freeze too many layers, or layers that cannot be frozen."""
    model = run.model
    dense = model.layers - model.stack_layers
    for setting, frozen in frozen_by_setting(run).items():
        if not dense < frozen < model.layers:
            yield (
                f"{setting}={frozen}: of the {model.layers} layers from {dense + 1} to "
                f"{model.layers - 1} can be frozen; set {setting}="
                f"{max(dense + 1, model.layers // 2)}"
            )
        if model.further_depth:
            yield (
                f"{setting}={frozen}: a model with [model.multi_token] learns with all its layers; "
                f"set {setting}=0"
            )
