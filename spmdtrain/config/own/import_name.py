"""Imports what a name such as FILE.py:NAME or package.module:NAME leads to.

A user's code runs only because the user names it: in a config, on the command line or in Python.
The code that a run directory names is not imported (checkpoints/restore.py).
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdtrain.config.errors import ConfigError, UserError
from spmdtrain.config.named_file import read_named
from spmdtrain.config.own.raised import PASSING, note_named, raised_in

# Modules loaded from files: path -> (its bytes, the module).
_loaded: dict[Path, tuple[bytes, ModuleType]] = {}


def import_named(name: str, setting: str, kind: str = "class") -> Any:
    """Returns what `FILE.py:NAME` or `package.module:NAME` names.

    A file is found from the working directory, and may import its neighbours. The code of the
    module runs. `setting` is the setting that has the name, and `kind` the word for what it should
    lead to; of a class, only something that can be called is accepted. Raises ConfigError if there
    is no such file, module or name, or if its code fails.
    """
    where, attribute = _parts_of(name, setting, kind)
    module = _module(name, where, setting)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if callable(found) or (found is not None and kind != "class"):
        note_named(module, setting, name)
        return found
    known = [key for key, value in vars(module).items() if _is_offered(value, module, kind)]
    raise ConfigError(
        f"{setting}={name!r}: {where} has no {kind} {attribute}",
        found=", ".join(known) or f"no {kind}",
    )


def run_named(name: str, setting: str, action: Callable[[], Any], passing: str = "") -> Any:
    """Runs the code that a setting names; an error becomes one line that says where it was raised.

    A UserError passes: it is such a line already. So does an error of the package `passing`.
    """
    try:
        return action()
    except PASSING:
        raise
    except Exception as error:  # a user's code may raise anything
        if passing and type(error).__module__.partition(".")[0] == passing:
            raise
        raise raised_in(f"{setting}={name!r}", error) from error


def home_of(name: str) -> str:
    """Returns the file or module in a name: `mine.py` of `mine.py:loss`."""
    return name.partition(":")[0]


def source_of(name: str, setting: str) -> tuple[str, str | None]:
    """Returns (the short name, a hash of the code) of the file or module in a name.

    Comments and line breaks do not affect the hash. It is None if there is no source.
    """
    where = _parts_of(name, setting, "name")[0]
    module = _module(name, where, setting)
    short = Path(where).name if where.endswith(".py") else where
    try:
        text = ast.unparse(ast.parse(Path(str(module.__file__)).read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return short, None
    return short, hashlib.sha256(text.encode()).hexdigest()[:16]


def _parts_of(name: str, setting: str, kind: str) -> tuple[str, str]:
    where, colon, attribute = name.partition(":")
    if not colon or not where or not attribute:
        word = kind.upper()
        raise ConfigError(f"{setting}={name!r}", fix=f"FILE.py:{word} or package.module:{word}")
    return where, attribute


def _is_offered(value: Any, module: ModuleType, kind: str) -> bool:
    """Returns True if a module has defined this itself, and a name may lead to it."""
    is_right = inspect.isclass(value) or (kind != "class" and inspect.isfunction(value))
    return is_right and value.__module__ == module.__name__


def _module(name: str, where: str, setting: str) -> ModuleType:
    if where.endswith(".py"):
        return _from_file(name, Path(where), setting)
    _make_importable(Path.cwd())
    return run_named(name, setting, lambda: importlib.import_module(where))


def _from_file(name: str, path: Path, setting: str) -> ModuleType:
    try:
        text = read_named(path)
    except OSError as error:
        there = sorted(file.name for file in path.parent.glob("*.py"))
        raise ConfigError(
            f"{setting}={name!r}: {path}: {error.strerror}",
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
            f"{setting}={name!r}: a module {path.stem} is already loaded, from {file}",
            fix="another name of the file",
        )
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a file that ends in .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        # Not by the spec's loader, whose bytecode may belong to an older text of the same size.
        run_named(name, setting, lambda: exec(compile(text, str(path), "exec"), vars(module)))
    except UserError:
        del sys.modules[path.stem]
        raise
    _loaded[path] = (text, module)
    return module


def _make_importable(folder: Path) -> None:
    """Appends a folder to the import path: a neighbour never shadows a library."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
