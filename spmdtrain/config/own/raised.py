"""Says in one line that code which a setting names has raised an error.

Much of it runs where nothing of ours is around it that knows its setting: while jax traces a model,
in a thread that reads ahead, in the methods of a sink. Such an error is known by the files in its
traceback.
"""

import contextlib
import os
import traceback
from collections.abc import Iterator
from types import FrameType, ModuleType, TracebackType

from spmdtrain.config.errors import OwnCodeError, UserError

# They are such lines already, or say that nobody reads what own code prints.
PASSING = (UserError, BrokenPipeError)
Place = tuple[FrameType, int]  # a frame, and its line
# The settings that name something in a file: path -> {setting: name}.
_named: dict[str, dict[str, str]] = {}


def note_named(module: ModuleType, setting: str, name: str) -> None:
    """Remembers that `setting` names something in this module, unless it is one of ours."""
    file = getattr(module, "__file__", None)
    if file and module.__name__.partition(".")[0] != __name__.partition(".")[0]:
        _named.setdefault(os.path.realpath(file), {})[setting] = name


@contextlib.contextmanager
def own_errors_named() -> Iterator[None]:
    """Turns an error of code that a setting names into an OwnCodeError; any other one passes."""
    try:
        yield
    except PASSING:
        raise
    except Exception as error:  # a user's code may raise anything
        if (found := of_own_code(error)) is None:
            raise
        raise found from error


def raised_in(what: str, error: Exception) -> OwnCodeError:
    """Returns the line about an error of the code that `what`, a setting, names."""
    places = list(_places(error))
    own = [place for place in places if _is_own(place)]
    place = ""
    if places and not isinstance(error, SyntaxError):  # whose message has the place
        frame, line = (own or places)[-1]
        place = f" ({frame.f_code.co_filename}, line {line})"
    return OwnCodeError(f"{what}: {type(error).__name__}: {error}{place}")


def traceback_of(error: OwnCodeError) -> str:
    """Returns the traceback of the error that own code has raised, from its first own frame on."""
    cause = error.__cause__
    if cause is None:
        return ""
    first = cause.__traceback__
    while first is not None and not _is_own((first.tb_frame, first.tb_lineno)):
        first = first.tb_next
    found = traceback.TracebackException(type(cause), cause, first or cause.__traceback__)
    return "".join(found.format(chain=cause.__cause__ is not None))


def of_own_code(error: Exception) -> OwnCodeError | None:
    """Returns the line about an error in whose traceback is a named file, or one beside it; None
    about any other error.
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
    """Returns the named files to which the code of a frame belongs: its own, or those beside it."""
    if frame.f_code.co_filename.startswith("<"):  # made by Python, in no folder
        return []
    file = os.path.realpath(frame.f_code.co_filename)
    if file in _named:
        return [file]
    folder = os.path.dirname(file)
    return [each for each in _named if os.path.dirname(each) == folder and _is_by_path(each)]


def _is_by_path(file: str) -> bool:
    """Returns True if a setting names the file as such: then it may import its neighbours."""
    return any(name.partition(":")[0].endswith(".py") for name in _named[file].values())
