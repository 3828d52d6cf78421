"""Records the code of a model: its class, and hashes of the sources outside this package.

A checkpoint keeps this record because weights alone do not determine a model: a subclass may have
the same parameters and compute something else.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flax import nnx

from spmdtrain.config.errors import CheckpointError
from spmdtrain.models.model import LanguageModel

# "class": a name; "sources": name -> hash; "make": as in model.make; "own": each file or module
# that [own] names -> hash
ModelCode = dict[str, Any]
OURS = "spmdtrain"
SHIPPED = f"{OURS}.Transformer"
# Libraries, whose sources are not part of the user's model.
LIBRARIES = {OURS, "pallas_kernels", "flax", "jax", "optax", "builtins", "functools"} | {
    *("abc", "collections", "typing"),  # of which flax makes its lists of modules
}


def model_code(
    make: Callable[..., Any], model: LanguageModel, spec: str | None = None
) -> ModelCode:
    """Returns the record of the code from which `make` built `model`; `spec` is `model.make`.

    "sources" has a hash of `make`, and of each class and function of the model and its parts that
    does not come from a library. For this package it has the version instead. A class without
    source (typed into a console) has the hash None, which equals any other.
    """
    parts = {}
    for part in (*_parts_of_make(make), *_parts(model)):
        if _root(part) not in LIBRARIES:
            parts[qualified_name(part)] = source_hash(part)
    name = qualified_name(type(model))
    if _root(type(model)) in LIBRARIES and parts:
        name += f" with {', '.join(sorted(parts))}"
    sources = dict(sorted(parts.items())) | {OURS: _our_version()}
    return {"class": name, "sources": sources, "make": spec}


def check_model_code(then: ModelCode, now: ModelCode, where: str) -> list[str]:
    """Returns lines that report code that changed since `then`.

    `where` names the checkpoint. Raises CheckpointError if its model is of another class; a class
    that merely moved to another module counts as the same.
    """
    if then["class"] != now["class"]:
        if not _has_moved(then, now):
            raise CheckpointError(
                f"{where} belongs to another model",
                asked=now["class"],
                found=then["class"],
                fix=_way_back(then),
            )
        return [
            f"the model {then['class']} of {where} is {now['class']} now; its source is the same"
        ]
    names = dict.fromkeys([*then["sources"], *now["sources"]])
    changed = [name for name in names if _differ(name, then, now)]
    before, after = then.get("own", {}), now.get("own", {})
    changed += [name for name in before if name in after and before[name] != after[name]]
    if not changed:
        return []
    return [f"the source of {', '.join(changed)} is not that of {where} any more"]


def qualified_name(thing: Any) -> str:
    """Returns `module.name` of a class or a function; in a script, the file stands for the module.

    A closure takes the name of the function that made it, and any other object the name of its
    class.
    """
    if isinstance(thing, functools.partial):
        return qualified_name(thing.func)
    update = getattr(thing, "update", None)
    if isinstance(thing, tuple) and callable(update):  # an optax transformation
        return qualified_name(update)
    named: Any = thing if hasattr(thing, "__qualname__") else type(thing)
    name = named.__qualname__.partition(".<locals>.<lambda>")[0]
    if not inspect.isclass(named):
        name = name.partition(".<locals>")[0]
    return f"{_module(named)}.{name}"


def _module(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or "builtins"
    root = module.partition(".")[0]
    if root == OURS:  # our files may move
        return root
    if module in sys.modules and module != "__main__":
        return module
    file = _file(thing)
    return Path(file).stem if file and Path(file).exists() else module


def _file(thing: Any) -> str | None:
    """Returns the file that a function, or a method of a class, was compiled from."""
    if not inspect.isclass(thing):
        return getattr(getattr(thing, "__code__", None), "co_filename", None)
    methods = (value for value in vars(thing).values() if inspect.isfunction(value))
    return next((method.__code__.co_filename for method in methods), None)


def _root(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0]


def _parts_of_make(make: Callable[..., Any]) -> Iterator[Any]:
    """Yields `make`, or the parts of a partial."""
    if not isinstance(make, functools.partial):
        yield make
        return
    parts = (make.func, *make.args, *make.keywords.values())
    yield from (part for part in parts if inspect.isclass(part) or inspect.isroutine(part))


def _parts(model: LanguageModel) -> Iterator[Any]:
    """Yields the classes of the model and its modules, with their bases and held functions."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            yield from inspect.getmro(type(node))
        elif inspect.isfunction(node):
            yield node


def source_hash(thing: Any) -> str | None:
    """Returns a hash of the code alone: comments and line breaks do not affect it."""
    try:
        text = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return None
    with contextlib.suppress(SyntaxError):  # a lambda in the middle of a line does not parse alone
        text = ast.unparse(ast.parse(text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _our_version() -> str | None:
    try:
        return version(OURS)
    except PackageNotFoundError:  # run from a source tree, not installed
        return None


def _differ(name: str, then: ModelCode, now: ModelCode) -> bool:
    if name not in then["sources"] or name not in now["sources"]:
        return True
    before = then["sources"][name]
    after = now["sources"][name]
    return None not in (before, after) and before != after


def _has_moved(then: ModelCode, now: ModelCode) -> bool:
    before = then["sources"].get(then["class"])
    return before is not None and before == now["sources"].get(now["class"])


def _way_back(then: ModelCode) -> str:
    if then["make"]:
        return f"--set model.make={then['make']}"
    if then["class"] == SHIPPED:
        return "the shipped model: no model.make and no make="
    return f"make={then['class'].rpartition('.')[2]} in Python, or model.make"
