"""[finetune]: which weights of a model are trained, and by what adapters."""

from typing import Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, CountOrZero, Fraction, Positive, Settings, Strings

LINEAR = ("q", "k", "v", "out", "gate", "up", "down")  # the linear layers of a shipped block


class FinetuneConfig(Settings):
    """Trains all weights, those of the upper layers, or small adapters of a frozen model."""

    kind: Literal["full", "lora", "dora"] = Field(
        default="full",
        description="all weights | a low-rank product added to each frozen matrix "
        "(arXiv:2106.09685) | that, with the length of each row learned apart (arXiv:2402.09353)",
    )
    frozen_layers: CountOrZero = Field(
        default=0,
        description="first layers that stay as they are, and with them what only embeds tokens: "
        "they keep no activations and have no backward",
    )
    rank: Count = Field(default=16, description="width of an adapter")
    alpha: Positive = Field(
        default=32.0, description="an adapter's product is multiplied by alpha / rank"
    )
    rank_stabilised: bool = Field(
        default=False, description="by alpha / sqrt(rank) in its place (arXiv:2312.03732)"
    )
    targets: Strings = Field(
        default=LINEAR,
        description="linear layers of a block that get an adapter, or patterns of paths of a "
        "model's own ones, as `show` prints them",
    )
    base: Literal["float", "int8", "nf4"] = Field(
        default="float",
        description="adapted weights rest as precision.frozen says | in 8 bits, with a scale for "
        "each output | in NF4, blocks of 64, 4.1 bits (arXiv:2305.14314)",
    )
    dropout: Fraction = Field(default=0.0, description="of an adapter's input")
    also_train: Strings = Field(
        default=(), description="patterns of paths of other weights that are trained, whole"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.kind == "full":
            for name, field in type(self).model_fields.items():
                if name != "frozen_layers" and getattr(self, name) != field.default:
                    raise ValueError(
                        f"finetune.{name}={getattr(self, name)!r} is of adapters, and "
                        "finetune.kind='full' trains all weights; set finetune.kind='lora'"
                    )
        elif not self.targets:
            raise ValueError(
                "finetune.targets is empty, so that there is no adapter; "
                f"set finetune.targets={','.join(LINEAR)}"
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
