"""Chooses the model that a run trains: a shipped one, or a custom one with its settings."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import typed_extra
from spmdtrain.config.named_code import import_named
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.transformer import Transformer

# Makes a LanguageModel from a RunConfig, nnx.Rngs, and `extra` if it takes that.
MakeModel = Callable[..., Any]
EXTRA = "extra"  # the argument that takes the settings of [model.extra]


def choose_model(
    config: RunConfig, make: MakeModel | str | None = None
) -> tuple[RunConfig, MakeModel]:
    """Returns the config with its [model.extra] complete, and the function that builds the model.

    `make` is a class or a function, or its name as in `model.make`. With None, the model is the one
    that `model.make` names, or else the shipped one. An argument `extra` that is annotated with a
    dataclass or a pydantic model gets the settings of [model.extra] as that class.

    Raises ConfigError if the name leads to no model, or if the settings are not those of the class.
    """
    check_make(make)
    chosen = make or config.model.make or Transformer
    if isinstance(chosen, str):
        config = _with(config, make=chosen)
        chosen = import_named(chosen, "model.make")
    if isinstance(chosen, partial) and EXTRA in chosen.keywords:
        return config, chosen  # its settings were chosen when the partial was made
    if EXTRA not in inspect.signature(_function(chosen)).parameters:
        if config.model.extra:
            name = getattr(chosen, "__name__", "the model")
            raise ConfigError(
                f"{name} reads no settings from [model.extra]",
                found=", ".join(f"model.extra.{key}" for key in config.model.extra),
                fix=f"def __init__(self, config, rngs, {EXTRA}: MySettings)",
            )
        return config, chosen
    kind = _annotation(chosen)
    if kind is None:
        return config, partial(chosen, extra=config.model.extra)
    settings, values = typed_extra(config, kind)
    return _with(config, extra=values), partial(chosen, extra=settings)


def check_make(make: Any) -> None:
    """Raises ConfigError if a caller's `make` is neither a model nor the name of one."""
    if make is not None and not callable(make) and not (isinstance(make, str) and make):
        fix = "a class, a function (config, rngs), or its name as in model.make"
        raise ConfigError(f"make={shown(make)} makes no model", fix=fix)


def _annotation(make: MakeModel) -> type | None:
    """Returns the class in which `make` expects its settings."""
    return get_type_hints(_function(make)).get(EXTRA)


def _function(make: MakeModel) -> Callable[..., Any]:
    """Returns the function whose arguments `make` takes: for a class its `__init__`."""
    function = make.func if isinstance(make, partial) else make
    return function.__init__ if inspect.isclass(function) else function


def _with(config: RunConfig, **values: Any) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=values)})
