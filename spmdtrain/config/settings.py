"""The base class of all sections of settings, and the kinds of their values."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from spmdtrain.config.arguments import ADDRESS
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.refusal import refusal_in_python

Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def _in_float32(value: float) -> float:
    """Refuses values that would become 0 or infinite in float32, in which devices compute."""
    if value and not 1.2e-38 <= value <= 3.4e38:
        raise PydanticCustomError("float32_range", "in the range of float32, 1.2e-38 to 3.4e38")
    return value


def _in_a_folder(value: str) -> str:
    """Refuses the address of a store, which would become a folder of that name."""
    if ADDRESS.match(value):
        raise PydanticCustomError("address", "a folder (an address is not one)")
    return value


# A file or folder. A setting that also takes addresses is a `str`, and names its readers.
LocalPath = Annotated[str, AfterValidator(_in_a_folder)]
Positive = Annotated[PositiveFloat, AfterValidator(_in_float32)]
NonNegative = Annotated[NonNegativeFloat, AfterValidator(_in_float32)]
Decay = Annotated[float, Field(gt=0, lt=1), AfterValidator(_in_float32)]
# Devices count in int32, both steps and elements of a dim.
Count = Annotated[int, Field(gt=0, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
# The tokens of a whole run are counted on the host: on many devices they exceed int32 within hours.
Tokens = Annotated[int, Field(gt=0, lt=2**62)]
# TOML has only lists, so this is not strict about the container; its elements stay strict.
Strings = Annotated[tuple[str, ...], Field(strict=False)]


T = TypeVar("T")
if TYPE_CHECKING:
    Derived = Annotated[T | Any, "resolved"]  # Any: None until it is resolved
    DerivedOrNone = T | None
else:
    # A setting that may be left out, and then follows from others, by `Settings.derived`. It is
    # None in a file and in the schema, but never when code reads it.
    Derived = Optional
    # A setting that applies to some choices of another, e.g. to float16. Under the others it stays
    # None, and cannot be set.
    DerivedOrNone = Optional


class _InOneLine(type(BaseModel)):
    """The metaclass that makes `TrainConfig(steps=0)` a ConfigError of one line, as in a file."""

    if not TYPE_CHECKING:

        def __call__(cls, *sections, **values):
            if sections:
                raise ConfigError(f"{cls.__name__} takes keywords only", fix=f"{cls.__name__}(...)")
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise refusal_in_python(cls.__name__, cls.model_fields, error) from None


class Settings(BaseModel, metaclass=_InOneLine):
    """The base of all sections: frozen, refuses unknown keys, and does not convert TOML's types.

    A setting that was left out and follows from others is resolved here, once: before the checks of
    a section, and again in a copy with other settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    # If two runs differ in a setting of this section, this is the part of a step that the setting
    # decides, a `Kind` of lab/diff/meaning.py, by name; "" stands for those without an entry.
    decides: ClassVar[Mapping[str, str]] = {}
    # The settings that only the training of the whole run has, and that a run of its model alone,
    # or of a few steps, does without; "" stands for all of the section.
    of_whole_run: ClassVar[tuple[str, ...]] = ()

    # The settings that shape no weight and no other array of a state, so that a checkpoint of a run
    # with other values of them fits; "" stands for all of the section.
    of_no_array: ClassVar[tuple[str, ...]] = ()

    def derived(self) -> dict[str, Any]:
        """Returns the values that follow from other settings, for those that nobody has set.

        A section among them replaces the section of this name; it may have derived settings too.
        """
        return {}

    def lost_in_small_runs(self) -> str:
        """Returns the effect of these settings that a small run on one device lacks, or ""."""
        return ""

    def affecting_numbers(self) -> dict[str, Any]:
        """Returns the settings that affect the numbers of a run but may change when it resumes, as
        JSON values: a checkpoint keeps them, and a run that goes on with others says so.
        """
        return {}

    def other_runs(self) -> Mapping[str, str | None]:
        """Returns the folders of other runs, or of published models, by the setting for each."""
        return {}

    def is_given(self, name: str) -> bool:
        """Returns True if somebody chose this value: it is neither a default nor derived."""
        return name in self.__pydantic_fields_set__

    def is_derived(self, name: str) -> bool:
        """Returns True if this value follows from other settings."""
        field = type(self).model_fields[name]
        was_left_out = field.default is None and not self.is_given(name)
        return was_left_out and getattr(self, name) is not None

    def with_derived(self, **values: Any) -> Self:
        """Returns a copy with these values for settings that nobody chose; whatever depends on them
        is derived again.

        For settings that follow from those of another section.
        """
        copied = super().model_copy()
        copied._take(values)
        copied._take(copied.derived())
        return copied

    def as_given(self) -> dict[str, Any]:
        """Returns the settings as JSON values, with None for each derived one.

        Records of runs are compared in this form: a derived value is not a choice in itself.
        """
        values = self.model_dump(mode="json")
        for name in type(self).model_fields:
            if self.is_derived(name):
                values[name] = None
            elif isinstance(section := getattr(self, name), Settings):
                values[name] = section.as_given()
        return values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with other settings, and derives again whatever depends on them."""
        copied = super().model_copy(update=update, deep=deep)
        copied._take(copied.derived())
        return copied

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        self._take(self.derived())
        return self

    def _take(self, values: Mapping[str, Any]) -> None:
        """Sets the values that nobody chose. A value of `none` is not a choice."""
        for name, value in values.items():
            if isinstance(value, Settings):
                object.__setattr__(self, name, value)  # frozen to everybody else
            elif not self.is_given(name) or getattr(self, name) is None:
                object.__setattr__(self, name, value)
                self.__pydantic_fields_set__.discard(name)
