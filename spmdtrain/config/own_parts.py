"""Makes the parts of a run that [own] names; a caller of `run` passes the same ones as keywords.

A name leads to the part itself, or to a function or class that makes it. The values of
[own.arguments] are passed as keyword arguments, and so is the config to a parameter called
`config`. A function that then needs no further argument is called, and returns the part.
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

    Raises ConfigError if there is no such object, if its code fails, or if the result cannot be
    called with the arguments of such a part.
    """
    name = getattr(config.own, part)
    return None if name is None else _parts(config, part, (name,))[0]


def own_list(config: RunConfig, part: str) -> list[Any]:
    """Returns the sinks or hooks that [own] names. Raises ConfigError as `own_part` does."""
    return _parts(config, part, getattr(config.own, part))


def with_own_parts(config: RunConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the caller's arguments by keyword; one that is None becomes the part [own] names."""
    return {
        part: own_part(config, part) if argument is None else argument
        for part, argument in arguments.items()
    }


def own_sources(config: RunConfig) -> dict[str, str | None]:
    """Returns a hash of the code of each file or module that [own] names."""
    return dict(source_of(name, f"own.{part}") for part, name in config.own.names())


def _parts(config: RunConfig, part: str, names: Sequence[str]) -> list[Any]:
    targets = [import_named(name, f"own.{part}", kind="name") for name in names]
    arguments = config.own.arguments.get(part, {})
    _check_arguments(config, part, targets)
    return [
        _made(config, part, name, thing, arguments)
        for name, thing in zip(names, targets, strict=True)
    ]


def _made(config: RunConfig, part: str, name: str, thing: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the part that `thing`, the object called `name`, is or makes."""
    if callable(thing):
        thing = _with_arguments(config, part, name, thing, arguments)
    if part in NOT_CALLED and not callable(thing):
        return _wrap_functions(part, name, thing)
    _check_call(part, name, thing)
    return _with_named_errors(part, name, thing)


def _with_arguments(
    config: RunConfig, part: str, name: str, thing: Any, arguments: Mapping[str, Any]
) -> Any:
    """Binds the arguments. Returns the bound function or class, or, if it needs no more arguments,
    its result.
    """
    takes = _parameters(thing)
    bound = {key: value for key, value in arguments.items() if _accepts(takes, key)}
    opens_itself = part == "sinks"  # a run calls it with its directory, the config and the step
    if CONFIG in takes and not opens_itself:
        bound[CONFIG] = config
    if not opens_itself and _needs_no_more(takes, bound):
        return run_named(name, f"own.{part}", lambda: thing(**bound))
    return partial(thing, **bound) if bound else thing


def _with_named_errors(part: str, name: str, thing: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its errors are one line: the setting that named it, and the place.

    Errors that jax raises while it traces the function pass: our callers report those themselves.
    """

    def called(*positional: Any, **keywords: Any) -> Any:
        return run_named(name, f"own.{part}", lambda: thing(*positional, **keywords), passing="jax")

    named = thing
    while isinstance(named, partial):
        named = named.func
    if not hasattr(named, "__qualname__"):
        named = type(named)
    called.__module__, called.__qualname__ = named.__module__, named.__qualname__
    called.__dict__["__wrapped__"] = named  # its source is the one to record
    return called


def _wrap_functions(part: str, name: str, thing: Any) -> Any:
    """Wraps the functions of a Source as `_with_named_errors` does.

    A transformation is returned as it is: jax traces its functions, and may compare them by
    identity.
    """
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    functions = {
        field.name: _with_named_errors(part, name, value)
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
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())


def _needs_no_more(takes: Parameters, bound: Mapping[str, Any]) -> bool:
    """Returns True if `bound` has every argument that a call needs: the call then makes a part."""
    kinds = inspect.Parameter
    if any(parameter.kind is kinds.VAR_POSITIONAL for parameter in takes.values()):
        return False
    needed = {key for key, parameter in takes.items() if parameter.default is kinds.empty}
    needed -= {key for key, parameter in takes.items() if parameter.kind in OPEN}
    return needed <= bound.keys()


def _check_arguments(config: RunConfig, part: str, targets: Sequence[Any]) -> None:
    """Refuses a value of [own.arguments] for which no part has an argument."""
    takes = [_parameters(target) for target in targets if callable(target)]
    own = {
        key: None
        for parameters in takes
        for key, parameter in parameters.items()
        if parameter.kind not in OPEN
    }
    known = [key for key in own if key not in (*PARTS[part], CONFIG)]
    for key in config.own.arguments.get(part, {}):
        is_known = any(_accepts(parameters, key) for parameters in takes)
        if key in (*PARTS[part], CONFIG) or not is_known:
            name = f"own.arguments.{part}.{key}"
            where = config.origin.get(name, "default")
            raise ConfigError(
                f"unknown key {name} (from {where}){did_you_mean(key, known)}",
                found=", ".join(known) or f"no argument of own.{part} that takes a value",
            )


def _check_call(part: str, name: str, thing: Any) -> None:
    """Refuses a part that cannot be called with the arguments that a run passes to it."""
    arguments = PARTS[part]
    try:
        inspect.signature(thing).bind(*arguments)
    except ValueError:  # Python does not know its arguments
        return
    except TypeError as error:
        raise ConfigError(
            f"own.{part}={name!r} cannot be called as ({', '.join(arguments)}): {error}",
            fix="values in [own.arguments], or other arguments",
        ) from None
