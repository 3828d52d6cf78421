"""[own]: parts of a run that are the user's code, by name."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import Field, model_validator

from spmdtrain.config.settings import Settings, Strings

# The arguments with which a run calls each part, in order: it must accept as many.
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optimizer": ("path", "parameter"),
        "learning_rate": ("step",),
        "loss": ("logits", "targets"),
        "data": ("seed", "sample"),
        "sinks": ("directory", "config", "step"),
        "hooks": ("event", "step", "figures"),
    }
)


class OwnConfig(Settings):
    """The parts of a run that are your own code, as `FILE.py:NAME` or `package.module:NAME`.

    A name leads to what `run` takes as a keyword, or to a function that returns it.
    """

    optimizer: str | None = Field(
        default=None,
        description="an optax transformation, or a function (path, parameter) -> transformation, "
        "instead of that of optimizer.name; default: that one",
    )
    learning_rate: str | None = Field(
        default=None,
        description="a function (step) -> rate, instead of optimizer.schedule; default: that one",
    )
    loss: str | None = Field(
        default=None,
        description="a function (logits, targets) -> loss of each token, or several by name; "
        "default: cross-entropy",
    )
    data: str | None = Field(
        default=None,
        description="a function (seed, sample) -> ids, or a Source, instead of [data]; asks for "
        "model.vocab; default: data.corpus",
    )
    sinks: Strings = Field(
        default=(),
        description="classes (directory, config, step) that take figures and events, in addition "
        "to log.sinks",
    )
    hooks: Strings = Field(
        default=(),
        description="functions (event, step, figures), called after each step, evaluation and save",
    )
    arguments: dict[str, Any] = Field(
        default={},
        description="a table for each part, e.g. [own.arguments.loss]: values of its arguments, by "
        "name",
    )

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields (part, name) of everything that is named."""
        for part in PARTS:
            named = getattr(self, part)
            for name in (named,) if isinstance(named, str) else named or ():
                yield part, name

    @model_validator(mode="after")
    def _check(self):
        named = dict(self.names())
        for part, name in self.names():
            where, colon, attribute = name.partition(":")
            if not (where and colon and attribute):
                raise ValueError(f"own.{part}={name!r} is not FILE.py:NAME or package.module:NAME")
        for part, values in self.arguments.items():
            if part not in PARTS:
                raise ValueError(
                    f"own.arguments.{part}: there is no part own.{part}, but {', '.join(PARTS)}"
                )
            if not isinstance(values, dict):
                raise ValueError(
                    f"own.arguments.{part}={values!r:.80} is a table; set "
                    f"own.arguments.{part}.NAME, an argument of own.{part}"
                )
            if part not in named:
                raise ValueError(
                    f"own.arguments.{part} has values for own.{part}, which is not set"
                )
        return self


def split_own(
    named: Mapping[str, Any], homes: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the recorded [own] into (names in these files or modules, names in others).

    Sinks and hooks are in neither: readers of a run do not need them.
    """
    inside: dict[str, Any] = {}
    outside: dict[str, Any] = {}
    for part in ("optimizer", "learning_rate", "loss", "data"):
        name = named.get(part)
        if isinstance(name, str):
            side = inside if name.partition(":")[0] in homes else outside
            side[part] = name
    values = named.get("arguments")
    values = values if isinstance(values, dict) else {}
    inside["arguments"] = {part: arguments for part, arguments in values.items() if part in inside}
    return inside, outside
