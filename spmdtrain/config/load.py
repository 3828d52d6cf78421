"""Makes a RunConfig from TOML files and `--set` strings, and writes it as TOML or JSON.

Terms. A *source* is one file, or all `--set` strings; a later source wins over an earlier one. A
*table* is a TOML table: a dict whose values may be dicts. A *path* is a key as a tuple, e.g.
`("train", "steps")`; the same as a dotted key is "train.steps". The *origin* of a dotted key is the
file that it came from, or `--set`. A key without one has its default, or is *derived*: it follows
from other settings, and a reader of the written config derives it again.
"""

import difflib
import functools
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from spmdtrain.config.arguments import as_path, as_texts, shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.near import nearest, usual
from spmdtrain.config.refusal import expectation
from spmdtrain.config.run_files import CONFIG, DERIVED, given_in
from spmdtrain.config.schema import RunConfig, Settings
from spmdtrain.config.sections import tables
from spmdtrain.config.toml_file import DEEPEST, MOST_EXTENDED, parse_toml, read_toml

TomlTable = dict[str, Any]
Origin = dict[str, str]
KeyPath = tuple[str, ...]

COMMAND_LINE = "--set"
DEFAULT = "default"
# TOML has no null. If a field may be None, this string means None, in files and in `--set`.
NONE = "none"
# A key of [model] that is not a setting: it brings in the settings of an existing model.
FROM = "from"
KIND = ("model", "rope_scaling", "kind")  # most settings of its table belong to one kind
OWN = "own"  # the section of a person's code: a setting of the same name elsewhere is meant first
MOST_NAMED = 24  # settings of a section listed in a refusal
# What users of other trainers look for first. Dotted key -> the missing feature.
NOT_YET = {
    "train.freeze": "frozen = true in a group of [[optimizer.groups]] does it",
}


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a TOML file and the files that it `extends`, and applies `a.b=c` strings on top.

    Raises ConfigError if anything is wrong with the files, the strings or the settings.
    """
    table: TomlTable = {}
    origin: Origin = {}
    overrides = as_overrides(overrides)
    for where, source in _read_chain(as_path(path, "path")):
        _add_source(table, source, origin, where)
    _add_overrides(table, overrides, origin)
    return _with_origin(_build(table, origin), origin)


def as_overrides(overrides: Any) -> tuple[str, ...]:
    """Returns a caller's `a.b=c` strings as a tuple. Raises ConfigError if they are not strings."""
    return as_texts(overrides, "overrides", "train.steps=100")


def resolved(config: RunConfig) -> dict[str, Any]:
    """Returns every value and its origin, as plain JSON values.

    RUN/config.json holds it: {"config": {section: {...}}, "origin": {dotted key: origin}}.
    """
    values = config.model_dump(mode="json")
    keys = [".".join(path) for path, _ in _leaves(values)]
    origin = dict.fromkeys(keys, DEFAULT) | dict.fromkeys(_derived(config), DERIVED)
    return {
        "config": values,
        "origin": origin | {key: where for key, where in config.origin.items() if key in origin},
    }


def from_resolved(values: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads back what `resolved` returned, with origins, and applies `a.b=c` strings on top.

    Raises ConfigError if this version cannot obey it.
    """
    is_table = isinstance(values, dict)
    if not is_table or not all(isinstance(values.get(part), dict) for part in ("config", "origin")):
        keys = ", ".join(values) if is_table else f"{values!r:.80}"
        raise ConfigError(
            "config.json is not a resolved config", found=keys, fix="a new run directory"
        )
    table = given_in(values)
    origin = {k: where for k, where in values["origin"].items() if where not in (DEFAULT, DERIVED)}
    # For messages every key needs an origin, even the defaults of the version that wrote the file:
    # this version may not know the setting. So at least name the file.
    overrides = as_overrides(overrides)
    named = {".".join(path): CONFIG for path, _ in _leaves(table)} | origin
    _add_overrides(table, overrides, named)
    origin |= {key: where for key, where in named.items() if where == COMMAND_LINE}
    return _with_origin(_build(table, named), origin)


def typed_extra(config: RunConfig, kind: type) -> tuple[Any, dict[str, Any]]:
    """Returns the settings of [model.extra] as an object of `kind`, and all its values as JSON.

    `kind` is a dataclass or a pydantic model. Raises ConfigError for settings that it lacks or
    refuses.
    """
    table = config.model.extra
    adapter = TypeAdapter(kind)
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {})
    for name in table:
        if fields and name not in fields:
            where = config.origin.get(f"model.extra.{name}", DEFAULT)
            close = nearest(name, fields)
            hint = f", did you mean model.extra.{close}?" if close else ""
            known = f"[model.extra]: {', '.join(fields)}"
            what = f"unknown key model.extra.{name} (from {where}){hint}"
            raise ConfigError(what, found=known)
    try:
        settings = adapter.validate_python(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("model", "extra", *first["loc"])))
        if first["type"] == "missing":
            raise ConfigError(f"{key} is missing, {kind.__name__} has no default for it") from None
        where = config.origin.get(key, DEFAULT)
        raise _refused(key, first["input"], where, expectation(first)) from None
    return settings, adapter.dump_python(settings, mode="json", exclude_none=True)


def to_toml(config: RunConfig) -> str:
    """Returns the resolved config as a TOML file that loads back to equal settings.

    Each line has its origin as a comment. A value of None is left out, or written as "none" if
    leaving it out would mean something else; a derived value is left out, too.
    """
    lines: list[str] = []
    for section, values in config.as_given().items():
        fields = type(getattr(config, section)).model_fields
        plain: TomlTable = {}
        inner: dict[str, TomlTable] = {}  # written afterwards, under separate headers
        for name in sorted(values, key=lambda name: name != "name"):  # `name` first
            value = values[name]
            if value is None and fields[name].default is None:
                continue
            if isinstance(value, dict) and value:
                inner[name] = value
            else:
                plain[name] = value
        if plain or not inner:
            lines += _toml_lines((section,), plain, config.origin)
        for name, entries in inner.items():
            lines += _toml_lines((section, name), entries, config.origin)
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a config file, for editors.

    It allows `extends`, and requires nothing.
    """
    schema = _schema_for_toml(RunConfig.model_json_schema())
    # Another file may add to a table, so no table has to be complete.
    for _, table in tables():
        schema["$defs"][table.__name__].pop("required", None)
    extends = {
        "type": "string",
        "description": "a TOML file, relative to this one, whose settings come first",
    }
    model = {
        "type": "string",
        "description": "a run, or a folder of Hugging Face, whose model's settings come first",
    }
    for name in ("GPT", "Llama"):
        of_model = schema["$defs"][name]
        of_model["properties"] = {FROM: model} | of_model["properties"]
    return schema | {"properties": {"extends": extends} | schema["properties"]}


def _derived(settings: Settings, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of the settings that follow from others."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if settings.is_derived(name):
            yield prefix + name
        elif isinstance(value, Settings):
            yield from _derived(value, f"{prefix}{name}.")


# --- sources ----------------------------------------------------------------------------------


def _read_chain(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[str, TomlTable]]:
    """Reads a file and those it extends; returns (file name, table), root of the chain first.

    `above` are the files that led here.
    """
    if len(above) > MOST_EXTENDED:
        raise ConfigError(
            f"more than {MOST_EXTENDED} files extend each other", found=f"{above[0]} -> ... {path}"
        )
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r} is not a path", found="the character NUL")
    # Path.resolve would raise where links go in a circle.
    if os.path.realpath(path) in map(os.path.realpath, above):
        raise ConfigError(f"{path} extends itself", found=" -> ".join(map(str, (*above, path))))
    source = _read(path, above)
    if "extends" not in source:
        return [(str(path), source)]
    extended = source.pop("extends")
    if not isinstance(extended, str):
        raise _refused("extends", extended, str(path), "a string (one file name)")
    below = _read_chain(path.parent / extended, (*above, path))
    return [*below, (str(path), source)]


def _read(path: Path, above: tuple[Path, ...]) -> TomlTable:
    name = str(path)
    if above:
        name += f" (extended by {above[-1]})"
    return read_toml(path, f"config file {name}")


def _add_source(table: TomlTable, source: TomlTable, origin: Origin, where: str) -> None:
    """Applies a source on top of `table`; records in `origin` that its keys came from `where`.

    A section whose name selects another class (model.name, optimizer.name) is emptied first, and so
    is a table of another kind: what earlier sources set was meant for the other one.
    """
    source = _put_model_below(table, source, origin, where)
    for section, values in source.items():
        earlier = table.get(section)
        if isinstance(earlier, dict) and _picks_other_class(section, earlier, values):
            table[section] = {}
            for key in [key for key in origin if key.startswith(f"{section}.")]:
                del origin[key]
    _drop_other_kind(table, source, origin)
    _take_one_length(table, source, origin, where)
    _merge(table, source, origin, where)


def _put_model_below(table: TomlTable, source: TomlTable, origin: Origin, where: str) -> TomlTable:
    """Replaces [model] so far by the settings of the model that `model.from` names.

    Returns the source without it; whatever else the source sets comes on top.
    """
    model = source.get("model")
    if not isinstance(model, dict) or FROM not in model:
        return source
    name = model[FROM]
    if not isinstance(name, str) or not name:
        raise _refused(f"model.{FROM}", name, where, "a run, or a folder of Hugging Face")
    from spmdtrain.config.published.model_from import settings_of_model

    file, settings = settings_of_model(as_path(name, f"model.{FROM}"))
    rest = {key: value for key, value in model.items() if key != FROM}
    own = rest.get("name", settings["name"])
    if own != settings["name"]:
        raise ConfigError(
            f"model.name={own!r} and model.{FROM}={name!r} name two models",
            found=f"name={settings['name']!r} there",
            fix="leaving model.name out",
        )
    table["model"] = {}
    for key in [key for key in origin if key.startswith("model.")]:
        del origin[key]
    _merge(table, {"model": settings}, origin, f"{file}, model.{FROM}")
    return source | {"model": rest}


def _drop_other_kind(table: TomlTable, source: TomlTable, origin: Origin) -> None:
    """Drops [model.rope_scaling] if a later source sets another kind."""
    before, after = _kind_in(table), _kind_in(source)
    if None in (before, after) or before == after:
        return
    section, name, _ = KIND
    del table[section][name]
    for key in [key for key in origin if key.startswith(f"{section}.{name}.")]:
        del origin[key]


def _kind_in(table: Any) -> Any:
    for name in KIND:
        table = table.get(name) if isinstance(table, dict) else None
    return table


def _take_one_length(table: TomlTable, source: TomlTable, origin: Origin, where: str) -> None:
    """Drops train.steps if a later source sets train.epochs, and vice versa.

    If one source sets both, both are left in the table and refused later.
    """
    earlier, later = table.get("train"), source.get("train")
    if not isinstance(earlier, dict) or not isinstance(later, dict):
        return
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        is_set = later.get(name) not in (None, NONE)
        if is_set and other in earlier and origin.get(f"train.{other}") != where:
            del earlier[other]
            origin.pop(f"train.{other}", None)


def _picks_other_class(section: str, earlier: TomlTable, values: Any) -> bool:
    before = earlier.get("name", _default_name(section))
    if before is None or not isinstance(values, dict):
        return False
    return values.get("name", before) != before


def _merge(
    table: TomlTable, source: TomlTable, origin: Origin, where: str, prefix: str = ""
) -> None:
    for name, value in source.items():
        origin[prefix + name] = where
        if isinstance(value, dict):
            if not isinstance(table.get(name), dict):
                table[name] = {}
            _merge(table[name], value, origin, where, f"{prefix}{name}.")
        else:
            table[name] = value


def _add_overrides(table: TomlTable, overrides: Sequence[str], origin: Origin) -> None:
    """Applies `--set` strings on top of `table`.

    They are parsed by the types of the class that their section ends up with, so names are applied
    first, whatever the order in which they were typed.
    """
    pairs: list[tuple[KeyPath, str]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {override!r} is not KEY=VALUE", fix="--set train.steps=100")
        path = tuple(key.strip().split("."))
        if len(path) > DEEPEST:
            raise ConfigError(f"--set {key[:40]}... is a key of more than {DEEPEST} parts")
        pairs.append((path, text.strip()))
    for path, text in sorted(
        pairs, key=lambda pair: (not _is_from(pair[0]), not _is_name(pair[0]))
    ):
        value: Any = text if _is_from(path) else _parse_override(path, text, table, origin)
        for name in reversed(path):
            value = {name: value}
        _add_source(table, value, origin, COMMAND_LINE)


def _is_from(path: KeyPath) -> bool:
    return path == ("model", FROM)


def _is_name(path: KeyPath) -> bool:
    return path[1:] == ("name",) or path == KIND


def _parse_override(path: KeyPath, text: str, table: TomlTable, origin: Origin) -> Any:
    key = ".".join(path)
    annotation = _find_type(path, table, origin | {key: COMMAND_LINE})
    if _is_name(path) and _default_name(path[0]):
        return text  # its type belongs to the earlier sources' class, which knows only its own name
    choices = _alternatives(annotation)
    if _is_section(annotation) and not (text.lower() == NONE and NoneType in choices):
        of_class = _inner_class(annotation)
        inside = next(iter(of_class.model_fields)) if of_class else "NAME"
        what = f"{key}={text!r} (from --set): {key} is a section, not a value"
        raise ConfigError(what, fix=f"{key}.{inside}=...")
    try:
        return _parse(annotation, text)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        expected = dict.fromkeys(map(expectation, errors))
        expected |= dict.fromkeys(_none_of(annotation))
        # If a list holds an unknown name, the line shows that name alone.
        value = errors[0]["input"] if errors[0]["type"] == "literal_error" else text
        raise _refused(key, value, COMMAND_LINE, *expected) from None


def _parse(annotation: Any, text: str) -> Any:
    """Parses a string by the type of its setting.

    It may be `none`, one of the choices, a list `3,4` or `[3,4]`, or any string that pydantic
    accepts for the type.
    """
    if annotation is Any:
        return _parse_free(text)
    choices = _alternatives(annotation)
    if text.lower() == NONE and NoneType in choices:
        return None
    literals = {str(choice): choice for choice in _literals(annotation)}
    if text in literals:
        return literals[text]
    lists = [choice for choice in choices if get_origin(choice) is tuple]
    bracketed = text.startswith("[") and text.endswith("]")
    if lists and (bracketed or str not in choices):
        item_type = get_args(lists[0])[0]
        inside = text[1:-1] if bracketed else text
        items = [item.strip().strip("\"'") for item in inside.split(",")]
        return [_parse(item_type, item) for item in items if item]
    return _adapter(annotation).validate_strings(text)


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """Returns the validator of a type; building one takes longer than checking a value."""
    return TypeAdapter(annotation)


def _parse_free(text: str) -> Any:
    """Parses a value of unknown type: as TOML if possible, or else as a string."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:  # TOML, but beyond the limits
        raise ConfigError(f"--set with {text[:40]}... cannot be read: {error}") from None


# --- lookups in the schema --------------------------------------------------------------------


def _default_name(section: str) -> str | None:
    """Returns the name of a section's default class; None if it has only one class."""
    field = RunConfig.model_fields.get(section)
    return getattr(field.default, "name", None) if field else None


def _section_class(section: str, table: TomlTable, origin: Origin) -> type[Settings]:
    """Returns the class that `table` selects for a section, by its `name`."""
    field = RunConfig.model_fields[section]
    values = table.get(section)
    if _default_name(section) is None or not isinstance(values, dict):
        return type(field.default)
    classes = {
        choice.model_fields["name"].default: choice for choice in _alternatives(field.annotation)
    }
    name = values.get("name", _default_name(section))
    if not isinstance(name, str) or name not in classes:
        key = f"{section}.name"
        raise _refused(key, name, origin[key], " or ".join(map(repr, classes)))
    return classes[name]


def _find_type(path: KeyPath, table: TomlTable, origin: Origin) -> Any:
    """Returns the type of the setting or section at a path.

    Raises ConfigError if there is none, and lists the names that exist.
    """
    where = origin[".".join(path)]
    section, *inner = path
    if section not in RunConfig.model_fields:
        raise _unknown(path[:1], RunConfig.model_fields, where)
    section_class = _section_class(section, table, origin)
    if not inner:
        return section_class
    fields = section_class.model_fields
    if inner[0] not in fields:
        raise _unknown(path[:2], fields, where)
    annotation = fields[inner[0]].annotation
    below = inner[1:]
    if get_origin(annotation) is dict and below:  # any name is one of its keys
        annotation = get_args(annotation)[1]
        below = [] if annotation is Any else below[1:]
    inner_class = _inner_class(annotation)
    if inner_class and below:
        if below[0] not in inner_class.model_fields:
            raise _unknown(path[: len(path) - len(below) + 1], inner_class.model_fields, where)
        annotation = inner_class.model_fields[below[0]].annotation
        below = below[1:]
    if below:
        value = ".".join(path[: -len(below)])
        key = ".".join(path)
        raise ConfigError(f"unknown key {key} (from {where}): {value} is a value, not a section")
    return annotation


def _is_section(annotation: Any) -> bool:
    return get_origin(annotation) is dict or _inner_class(annotation) is not None


def _inner_class(annotation: Any) -> type[Settings] | None:
    """Returns the class of a section, even of an optional one; None for any other type."""
    for choice in _alternatives(annotation):
        if isinstance(choice, type) and issubclass(choice, Settings):
            return choice
    return None


@functools.cache
def _alternatives(annotation: Any) -> list[Any]:
    """Returns the members of a (nested, annotated) union, or the single type."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [choice for member in get_args(annotation) for choice in _alternatives(member)]
    return [annotation]


def _literals(annotation: Any) -> list[Any]:
    """Returns the choices of all Literals in a union."""
    literals = [choice for choice in _alternatives(annotation) if get_origin(choice) is Literal]
    return [value for literal in literals for value in get_args(literal)]


def _none_of(annotation: Any) -> list[str]:
    return [repr(NONE)] if NoneType in _alternatives(annotation) else []


def _leaves(table: TomlTable, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields (path, value) of everything but non-empty tables."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in [*value.values(), *value] if isinstance(value, dict) else value:
            yield from _strings_in(item)


# --- validation and its messages --------------------------------------------------------------


def _build(table: TomlTable, origin: Origin) -> RunConfig:
    note = _shorten_warmup(table, origin)
    values: TomlTable = {}
    for path, value in _leaves(table):
        key = ".".join(path)
        annotation = _find_type(path, table, origin)
        choices = _alternatives(annotation)
        is_none = value in (None, NONE) and NoneType in choices
        if _is_section(annotation) and not isinstance(value, dict) and not is_none:
            raise _refused(key, value, origin[key], f"a section: write [{key}]")
        if any("\0" in text for text in _strings_in(value)):
            raise _refused(key, value, origin[key], "without the character NUL")
        literals = _literals(annotation)
        takes_switch = bool in _alternatives(annotation)
        if isinstance(value, bool) and literals and not takes_switch:  # or pydantic takes it for 1
            raise _refused(key, value, origin[key], " or ".join(map(repr, literals)))
        if is_none:
            value = None
        inner = values
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    for section, inner in values.items():
        name = _default_name(section)
        if name:
            inner.setdefault("name", name)  # pydantic needs it to choose the class
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _in_our_words(error, values, origin) from None
    if note:
        config.notes.append(note)
    return config


def _shorten_warmup(table: TomlTable, origin: Origin) -> str:
    """Shortens the warm-up of a file to the steps that were typed, for trials of a few steps.

    Returns a note about it, or "".
    """
    optimizer = table.get("optimizer")
    if origin.get("train.steps") != COMMAND_LINE or not isinstance(optimizer, dict):
        return ""
    steps = table["train"]["steps"]
    warmup = optimizer.get("warmup")
    if not isinstance(steps, int) or not isinstance(warmup, int) or not 0 < steps < warmup:
        return ""
    if origin["optimizer.warmup"] == COMMAND_LINE:
        return ""
    table["optimizer"]["warmup"] = steps
    where = origin["optimizer.warmup"]
    origin["optimizer.warmup"] = f"{where}, cut to train.steps"
    return f"optimizer.warmup={warmup} ({where}) is cut to {steps}, the train.steps that were typed"


def _with_origin(config: RunConfig, origin: Origin) -> RunConfig:
    settings = {".".join(path) for path, _ in _leaves(config.model_dump())}
    config.origin.update({key: where for key, where in origin.items() if key in settings})
    return config


def _in_our_words(error: ValidationError, values: TomlTable, origin: Origin) -> ConfigError:
    """Turns pydantic's first complaint into one line that names key, value and origin."""
    first, *others = error.errors(include_url=False)
    if (
        first["type"] == "value_error" and "ctx" in first
    ):  # raised by the schema's own checks, whose text names keys
        text = str(first["ctx"]["error"])
        keys = re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text)
        named = [f"{key} from {origin[key]}" for key in dict.fromkeys(keys) if key in origin]
        if named:
            return ConfigError(f"{text} ({', '.join(named)})")
        return ConfigError(f"{text} (from {', '.join(dict.fromkeys(origin.values()))})")
    key, inside, value = _locate(first["loc"], values)
    if inside and first["type"] == "extra_forbidden":
        return ConfigError(f"unknown key {key}{inside} (from {origin[key]})")
    if inside and first["type"] == "missing":
        return ConfigError(f"{key}{inside} is missing (from {origin[key]})")
    if first["type"] == "missing":
        where = origin.get(key, ", ".join(dict.fromkeys(origin.values())))
        return ConfigError(f"{key}.{first['loc'][-1]} is missing (from {where})")
    # A union complains once for each of its members.
    complaints = [first, *(other for other in others if _locate(other["loc"], values)[0] == key)]
    expected = dict.fromkeys(map(expectation, complaints))
    if item := _name_in_a_list(first):
        inside, value = item
    if not inside:
        expected |= dict.fromkeys(_none_of(_find_type(tuple(key.split(".")), values, origin)))
    return _refused(key, value, origin[key], *expected, inside=inside)


def _name_in_a_list(error: Any) -> tuple[str, Any] | None:
    """Returns (place, value) of an item of a list that is none of the names that may be there."""
    place = error["loc"][-1] if error["loc"] else None
    if error["type"] == "literal_error" and isinstance(place, int):
        return f"[{place}]", error["input"]
    return None


def _locate(loc: tuple[int | str, ...], values: TomlTable) -> tuple[str, str, Any]:
    """Returns (dotted key, place inside its list of tables or "", value) at a pydantic location.

    A location also holds tags of unions and indices of other lists, which are skipped.
    """
    path: list[str] = []
    inside = ""
    value: Any = values
    for part in loc:
        if isinstance(value, dict) and part in value:
            if inside:
                inside += f".{part}"
            else:
                path.append(str(part))
            value = value[part]
        elif isinstance(part, int) and part in _places_of_tables(value):
            inside = f"[{part}]"
            value = value[part]
        elif inside and isinstance(value, dict):  # a missing key
            inside += f".{part}"
    return ".".join(path), inside, value


def _places_of_tables(value: Any) -> list[int]:
    """Returns the places of a list at which it has a table; a location may name more places."""
    return [at for at, x in enumerate(value) if isinstance(x, dict)] if type(value) is list else []


def _refused(key: str, value: Any, where: str, *expected: str, inside: str = "") -> ConfigError:
    hint = ""
    if isinstance(value, str):
        close = nearest(value, re.findall(r"'([^']*)'", " ".join(expected)))
        if close:
            hint = f", did you mean {close!r}?"
    must = f"must be {' or '.join(expected)}"
    return ConfigError(f"{key}{inside}={shown(value)} (from {where}) {must}{hint}")


def _unknown(path: KeyPath, names: Collection[str], where: str) -> ConfigError:
    """Returns the error for an unknown key, with a suggestion.

    It suggests the key of another class of the section, or else the nearest of `names`, or else the
    same name in other sections: `--set steps=3` means train.steps.
    """
    *section, name = path
    known = usual(name)
    owners = []  # (section, its name field or None)
    for other, field in RunConfig.model_fields.items():
        for choice in _alternatives(field.annotation):
            if known in choice.model_fields:
                owners.append((other, choice.model_fields.get("name")))
    owners = [owner for owner in owners if owner[0] != OWN] or owners
    mine = [field for other, field in owners if field and [other] == section and name == known]
    classes = [repr(field.default) for field in mine]
    close = nearest(name, names)
    hint = ""
    key = ".".join(map(_toml_key, path))
    if key in NOT_YET:
        return ConfigError(f"{key} (from {where}) does not exist yet: {NOT_YET[key]}")
    if classes:
        hint = f", which belongs to {section[0]}.name={' or '.join(classes)}"
    elif close:
        hint = f", did you mean {'.'.join((*section, close))}?"
    elif owners:
        meant = dict.fromkeys(f"{other}.{known}" for other, _ in owners)
        hint = f", did you mean {' or '.join(meant)}?"
    section_name = f"[{'.'.join(section)}]" if section else "sections"
    if len(names) > MOST_NAMED:  # the most similar ones
        names = [*difflib.get_close_matches(name, names, MOST_NAMED, 0.0), "..."]
    known_names = f"{section_name}: {', '.join(names)}"
    return ConfigError(f"unknown key {key} (from {where}){hint}", found=known_names)


def settings_called(name: str) -> list[str]:
    """Returns the dotted keys of the settings that a flag of this name, e.g. --seed, may mean."""
    *section, last = name.lstrip("-").replace("-", "_").split(".")
    keys = {
        f"{owner}.{setting}": None
        for owner, field in RunConfig.model_fields.items()
        if section in ([], [owner])
        for choice in _alternatives(field.annotation)
        for setting in choice.model_fields
        if setting in (last, usual(last))
    }
    return [key for key in keys if not key.startswith(f"{OWN}.")] or list(keys)


# --- writing ----------------------------------------------------------------------------------


def _toml_lines(path: KeyPath, table: TomlTable, origin: Origin) -> list[str]:
    lines = [f"[{'.'.join(path)}]"]
    for name, value in table.items():
        where = origin.get(".".join((*path, name)), DEFAULT)
        lines.append(f"{_toml_key(name)} = {_toml_value(value)}  # {where}")
    return [*lines, ""]


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    if value is None:
        return _toml_value(NONE)
    if isinstance(value, dict):
        pairs = [f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON and TOML write numbers, booleans and strings alike, except for one control character that
    # JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _schema_for_toml(node: Any) -> Any:
    """Adapts pydantic's schema to what this file accepts.

    Null is "none", a section without `name` may be any of its classes, and the defaults of whole
    sections are left out, as are the examples of settings, which are values for tests to draw.
    """
    if isinstance(node, list):
        return [_schema_for_toml(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node == {"type": "null"}:
        return {"const": NONE}
    adapted = {}
    for key, value in node.items():
        if key == "discriminator":
            continue
        if key == "examples" and isinstance(value, list):
            continue
        if key == "default" and (value is None or isinstance(value, dict)):
            continue
        adapted["anyOf" if key == "oneOf" else key] = _schema_for_toml(value)
    return adapted
