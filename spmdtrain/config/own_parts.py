"""Makes the parts of a run that [own] names: what a caller of `run` may give as a keyword.

A name leads to the part itself, or to a function or class that makes it. Values of
[own.arguments] go to the arguments of their names, and the config to one called `config`. What
needs no other argument makes the part.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.named_code import import_named, run_named, source_of
from spmdtrain.config.near import did_you_mean
from spmdtrain.config.schema import RunConfig
from spmdtrain.config.schema.own import PARTS

CONFIG = "config"  # the argument that takes the RunConfig
NOT_CALLED = {"optimizer", "data"}  # may be a transformation, and a Source
Parameters = Mapping[str, inspect.Parameter]
OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def own_part(config: RunConfig, part: str) -> Any:
    """Returns the optimizer, learning_rate, loss or data that [own] names; None if it names none.

    Raises ConfigError if the name leads nowhere, if its code fails, or if the result cannot be
    called as such a part is.
    """
    name = getattr(config.own, part)
    return None if name is None else _parts(config, part, (name,))[0]


def own_list(config: RunConfig, part: str) -> list[Any]:
    """Returns the sinks or hooks that [own] names. Raises ConfigError as `own_part` does."""
    return _parts(config, part, getattr(config.own, part))


def with_own_parts(config: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a caller gave, by keyword; where that is None, the part that [own] names."""
    return {part: own_part(config, part) if each is None else each for part, each in given.items()}


def own_sources(config: RunConfig) -> dict[str, str | None]:
    """Returns a hash of the code of each file or module that [own] names."""
    return dict(source_of(name, f"own.{part}") for part, name in config.own.names())


def _parts(config: RunConfig, part: str, names: Sequence[str]) -> list[Any]:
    found = [import_named(name, f"own.{part}", kind="name") for name in names]
    arguments = config.own.arguments.get(part, {})
    _check_arguments(config, part, found)
    return [
        _made(config, part, name, thing, arguments)
        for name, thing in zip(names, found, strict=True)
    ]


def _made(config: RunConfig, part: str, name: str, thing: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the part that `thing`, to which `name` led, is or makes."""
    if callable(thing):
        thing = _with_arguments(config, part, name, thing, arguments)
    if part in NOT_CALLED and not callable(thing):
        return _with_functions(part, name, thing)
    _check_call(part, name, thing)
    return _in_one_line(part, name, thing)


def _with_arguments(
    config: RunConfig, part: str, name: str, thing: Any, arguments: Mapping[str, Any]
) -> Any:
    """Returns the function or class with its arguments, or what it makes from them alone."""
    takes = _parameters(thing)
    bound = {key: value for key, value in arguments.items() if _accepts(takes, key)}
    opens_itself = part == "sinks"  # a run calls it with its directory, the config and the step
    if CONFIG in takes and not opens_itself:
        bound[CONFIG] = config
    if not opens_itself and _needs_no_more(takes, bound):
        return run_named(name, f"own.{part}", lambda: thing(**bound))
    return partial(thing, **bound) if bound else thing


def _in_one_line(part: str, name: str, thing: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, whose errors say in one line which setting named it, and where
    they were raised.

    What jax raises while it traces the function passes: those who call it have their own words.
    """

    def called(*given: Any, **further: Any) -> Any:
        return run_named(name, f"own.{part}", lambda: thing(*given, **further), passing="jax")

    named = thing
    while isinstance(named, partial):
        named = named.func
    if not hasattr(named, "__qualname__"):
        named = type(named)
    called.__module__, called.__qualname__ = named.__module__, named.__qualname__
    called.__dict__["__wrapped__"] = named  # its source is the one to record
    return called


def _with_functions(part: str, name: str, thing: Any) -> Any:
    """Returns the same Source, whose functions say in one line which setting named it.

    A transformation stays: jax traces its functions, and may call them by their identity.
    """
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    functions = {
        field.name: _in_one_line(part, name, value)
        for field in dataclasses.fields(thing)
        if callable(value := getattr(thing, field.name))
    }
    return dataclasses.replace(thing, **functions)


def _parameters(thing: Any) -> Parameters:
    """Returns the parameters of a function or class; empty if Python does not know them."""
    try:
        return inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return {}


def _accepts(takes: Parameters, name: str) -> bool:
    if name in takes:
        return takes[name].kind not in OPEN
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())


def _needs_no_more(takes: Parameters, bound: Mapping[str, Any]) -> bool:
    """Returns True if a call with `bound` is complete, so that it can only be a maker."""
    kinds = inspect.Parameter
    if any(each.kind is kinds.VAR_POSITIONAL for each in takes.values()):
        return False
    needed = {key for key, each in takes.items() if each.default is kinds.empty}
    needed -= {key for key, each in takes.items() if each.kind in OPEN}
    return needed <= bound.keys()


def _check_arguments(config: RunConfig, part: str, found: Sequence[Any]) -> None:
    """Refuses a value of [own.arguments] for which no part has an argument."""
    takes = [_parameters(each) for each in found if callable(each)]
    own = {key: None for each in takes for key, kind in each.items() if kind.kind not in OPEN}
    known = [key for key in own if key not in (*PARTS[part], CONFIG)]
    for key in config.own.arguments.get(part, {}):
        if key in (*PARTS[part], CONFIG) or not any(_accepts(each, key) for each in takes):
            name = f"own.arguments.{part}.{key}"
            where = config.origin.get(name, "default")
            raise ConfigError(
                f"unknown key {name} (from {where}){did_you_mean(key, known)}",
                found=", ".join(known) or f"no argument of own.{part} that takes a value",
            )


def _check_call(part: str, name: str, thing: Any) -> None:
    """Refuses a part that cannot be called with what a run gives it."""
    given = PARTS[part]
    try:
        inspect.signature(thing).bind(*given)
    except ValueError:  # Python does not know its arguments
        return
    except TypeError as error:
        raise ConfigError(
            f"own.{part}={name!r} cannot be called as ({', '.join(given)}): {error}",
            fix="values in [own.arguments], or other arguments",
        ) from None
