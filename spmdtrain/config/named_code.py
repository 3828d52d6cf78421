"""Imports the object named by FILE.py:NAME or package.module:NAME; its errors become one line.

A user's code runs only because the user names it: in a config, on the command line or in Python.
The code that a run directory names is not imported (checkpoints/restore.py).

Much of it runs deep inside other code, which does not know the setting: while jax traces a model,
in a thread that reads ahead, in the methods of a sink. Errors raised there are recognised by the
files in their traceback.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

from spmdtrain.config.errors import ConfigError, OwnCodeError, UserError
from spmdtrain.config.named_file import read_named

# The former are such lines already, and the latter says that nobody reads the output any more.
PASSING = (UserError, BrokenPipeError)
Place = tuple[FrameType, int]  # a frame, and its line
# The settings that name something in a file: path -> {setting: name}.
_named: dict[str, dict[str, str]] = {}
# Modules loaded from files: path -> (its bytes, the module).
_loaded: dict[Path, tuple[bytes, ModuleType]] = {}


def import_named(name: str, setting: str, kind: str = "class") -> Any:
    """Returns the object named by `FILE.py:NAME` or `package.module:NAME`.

    A relative path starts at the working directory, and the file may import its neighbours. The
    code of the module runs. `setting` is the setting that holds the name. `kind` names the expected
    object in messages; a "class" must be callable. Raises ConfigError if there is no such file,
    module or name, or if its code fails.
    """
    where, attribute = _parts_of(name, setting, kind)
    module = _module(name, where, setting)
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if callable(target) or (target is not None and kind != "class"):
        note_named(module, setting, name)
        return target
    known = [key for key, value in vars(module).items() if _is_offered(value, module, kind)]
    raise ConfigError(
        f"{setting}={name!r}: {where} has no {kind} {attribute}",
        found=", ".join(known) or f"no {kind}",
    )


def run_named(name: str, setting: str, action: Callable[[], Any], passing: str = "") -> Any:
    """Runs code that a setting names; its error becomes one line that says where it was raised.

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
    """Returns True if the module itself defines this value, and it may be named."""
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
        neighbours = sorted(file.name for file in path.parent.glob("*.py"))
        raise ConfigError(
            f"{setting}={name!r}: {path}: {error.strerror}",
            found=", ".join(neighbours) or f"no .py file in {path.parent.absolute()}",
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


def note_named(module: ModuleType, setting: str, name: str) -> None:
    """Remembers that `setting` names something in this module, unless it is one of ours."""
    file = getattr(module, "__file__", None)
    if file and module.__name__.partition(".")[0] != __name__.partition(".")[0]:
        _named.setdefault(os.path.realpath(file), {})[setting] = name


@contextlib.contextmanager
def own_errors_named() -> Iterator[None]:
    """Turns an error raised by code that a setting names into an OwnCodeError; others pass."""
    try:
        yield
    except PASSING:
        raise
    except Exception as error:  # a user's code may raise anything
        if (own_error := of_own_code(error)) is None:
            raise
        raise own_error from error


def raised_in(what: str, error: Exception) -> OwnCodeError:
    """Returns the error to show for one that was raised in code named by the setting `what`."""
    places = list(_places(error))
    own = [place for place in places if _is_own(place)]
    place = ""
    if places and not isinstance(error, SyntaxError):  # whose message has the place
        frame, line = (own or places)[-1]
        place = f" ({frame.f_code.co_filename}, line {line})"
    return OwnCodeError(f"{what}: {type(error).__name__}: {error}{place}")


def traceback_of(error: OwnCodeError) -> str:
    """Returns the traceback of the user's own error, from the first frame of the user's code on."""
    cause = error.__cause__
    if cause is None:
        return ""
    first = cause.__traceback__
    while first is not None and not _is_own((first.tb_frame, first.tb_lineno)):
        first = first.tb_next
    shown = traceback.TracebackException(type(cause), cause, first or cause.__traceback__)
    return "".join(shown.format(chain=cause.__cause__ is not None))


def of_own_code(error: Exception) -> OwnCodeError | None:
    """Returns the error to show for one that passed through a named file, or one beside it; None
    for any other.
    """
    own = [place for place in _places(error) if _is_own(place)]
    if not own:
        return None
    frame, _ = own[-1]
    settings = {setting: name for file in _homes(frame) for setting, name in _named[file].items()}
    functions = {frame.f_code.co_qualname.partition(".")[0] for frame, _ in own}
    meant = {
        setting: name
        for setting, name in settings.items()
        if name.partition(":")[2].partition(".")[0] in functions
    }
    return raised_in(
        " or ".join(f"{key}={name!r}" for key, name in (meant or settings).items()), error
    )


def _places(error: BaseException) -> Iterator[Place]:
    at: TracebackType | None = error.__traceback__
    while at is not None:
        yield at.tb_frame, at.tb_lineno
        at = at.tb_next


def _is_own(place: Place) -> bool:
    return bool(_homes(place[0]))


def _homes(frame: FrameType) -> list[str]:
    """Returns the named files that a frame's code belongs to: its own file, or those beside it."""
    if frame.f_code.co_filename.startswith("<"):  # made by Python, in no folder
        return []
    file = os.path.realpath(frame.f_code.co_filename)
    if file in _named:
        return [file]
    folder = os.path.dirname(file)
    return [named for named in _named if os.path.dirname(named) == folder and _is_by_path(named)]


def _is_by_path(file: str) -> bool:
    """Returns True if a setting names the file by its path: it may then import its neighbours."""
    return any(name.partition(":")[0].endswith(".py") for name in _named[file].values())
