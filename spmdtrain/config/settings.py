"""The base class of all sections of settings, and the kinds of their values."""

from typing import TYPE_CHECKING, Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.refusal import refusal_in_python

Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def _in_float32(value: float) -> float:
    """Refuses values that would become 0 or infinite on devices, which compute in float32."""
    if value and not 1.2e-38 <= value <= 3.4e38:
        raise PydanticCustomError("float32_range", "in the range of float32, 1.2e-38 to 3.4e38")
    return value


Positive = Annotated[PositiveFloat, AfterValidator(_in_float32)]
NonNegative = Annotated[NonNegativeFloat, AfterValidator(_in_float32)]
Decay = Annotated[float, Field(gt=0, lt=1), AfterValidator(_in_float32)]
# Devices count in int32, both steps and elements of a dim.
Count = Annotated[int, Field(gt=0, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
# TOML has only lists, so this is not strict about the container; its elements stay strict.
Strings = Annotated[tuple[str, ...], Field(strict=False)]


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
