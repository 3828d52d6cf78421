"""Chooses the model that a run trains: a shipped one, or a custom one with its settings.

A user's code runs only because the user names it: in a config, on the command line or in Python.
The model that a run directory names is not imported (checkpoints/restore.py).
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.given import shown
from spmdtrain.config.load import typed_extra
from spmdtrain.config.named_file import read_named
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.transformer import Transformer

# Makes a LanguageModel from a RunConfig, nnx.Rngs, and `extra` if it takes that.
MakeModel = Callable[..., Any]
EXTRA = "extra"  # the argument that takes the settings of [model.extra]

# Modules loaded from files: path -> (its bytes, the module).
_loaded: dict[Path, tuple[bytes, ModuleType]] = {}


def choose_model(
    config: RunConfig, make: MakeModel | str | None = None
) -> tuple[RunConfig, MakeModel]:
    """Returns the config with its [model.extra] complete, and the function that builds the model.

    `make` is a class or a function, or a name like `model.make`. If it is not given, `model.make`
    names the model, or else it is the shipped one. An argument `extra` that is annotated with a
    dataclass or a pydantic model gets the settings of [model.extra] as that class.

    Raises ConfigError if the name leads to no model, or if the settings are not those of the class.
    """
    check_make(make)
    chosen = make or config.model.make or Transformer
    if isinstance(chosen, str):
        config = _with(config, make=chosen)
        chosen = import_model(chosen)
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


def import_model(name: str) -> MakeModel:
    """Returns the class or function that `FILE.py:NAME` or `package.module:NAME` names.

    A file is found from the working directory, and may import its neighbours. The code of the
    module runs. Raises ConfigError if there is no such file, module or name, or if its code fails.
    """
    where, colon, attribute = name.partition(":")
    if not colon or not where or not attribute:
        raise ConfigError(f"model.make={name!r}", fix="FILE.py:CLASS or package.module:CLASS")
    module = _from_file(name, Path(where)) if where.endswith(".py") else _from_package(name, where)
    found = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found
    classes = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    raise ConfigError(
        f"model.make={name!r}: {where} has no class {attribute}",
        found=", ".join(classes) or "no class",
    )


def _from_file(name: str, path: Path) -> ModuleType:
    try:
        text = read_named(path)
    except OSError as error:
        there = sorted(file.name for file in path.parent.glob("*.py"))
        raise ConfigError(
            f"model.make={name!r}: {path}: {error.strerror}",
            found=", ".join(there) or f"no .py file in {path.parent.absolute()}",
        ) from None
    path = path.resolve()
    if path in _loaded and _loaded[path][0] == text:
        return _loaded[path][1]
    other = sys.modules.get(path.stem)
    ours = any(other is module for _, module in _loaded.values())
    if other is not None and not ours:
        file = getattr(other, "__file__", None) or "Python itself"
        raise ConfigError(
            f"model.make={name!r}: a module {path.stem} is already loaded, from {file}",
            fix="another name of the file",
        )
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a file that ends in .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        # Not by the spec's loader, whose bytecode may belong to an older text of the same size.
        _run(name, lambda: exec(compile(text, str(path), "exec"), vars(module)))
    except ConfigError:
        del sys.modules[path.stem]
        raise
    _loaded[path] = (text, module)
    return module


def _from_package(name: str, where: str) -> ModuleType:
    _make_importable(Path.cwd())
    return _run(name, lambda: importlib.import_module(where))


def _make_importable(folder: Path) -> None:
    """Appends a folder to the import path: a neighbour never shadows a library."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _run(name: str, action: Callable[[], Any]) -> Any:
    """Runs the code of a module; an error becomes one line that says where it was raised."""
    try:
        return action()
    except Exception as error:  # a user's code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({last.filename}, line {last.lineno})"
        if isinstance(error, SyntaxError):
            place = ""  # its message has it
        raise ConfigError(f"model.make={name!r}: {type(error).__name__}: {error}{place}") from error


def _annotation(make: MakeModel) -> type | None:
    """Returns the class in which `make` expects its settings."""
    return get_type_hints(_function(make)).get(EXTRA)


def _function(make: MakeModel) -> Callable[..., Any]:
    """Returns the function whose arguments `make` takes: for a class its `__init__`."""
    function = make.func if isinstance(make, partial) else make
    return function.__init__ if inspect.isclass(function) else function


def _with(config: RunConfig, **values: Any) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=values)})
