"""TOML files and `--set` strings in, one RunConfig out; and a RunConfig out again as TOML or JSON.

Words: a *layer* is one file or all `--set` strings; later layers win. *Tables* are the nested dicts that layers are
merged into. A *path* is a key as a tuple, `("train", "steps")`. The *origin* of a dotted key is the file it came from,
or `--set`; a key without one has its default.
"""

import copy
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, Settings

Tables = dict[str, Any]
Origin = dict[str, str]
KeyPath = tuple[str, ...]

COMMAND_LINE = "--set"
DEFAULT = "default"
# TOML has no null: this string is None, in files and on the command line, where the field may be None.
NONE = "none"


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a TOML file, the files it `extends` and `a.b=c` strings describe. Raises ConfigError only."""
    tables: Tables = {}
    origin: Origin = {}
    for where, layer in _file_layers(Path(path)):
        _add_layer(tables, layer, origin, where)
    _add_overrides(tables, overrides, origin)
    return _with_origin(_build(tables, origin), origin)


def resolved(config: RunConfig) -> dict[str, Any]:
    """Every value and where it came from, as plain JSON values: what RUN/config.json holds."""
    values = config.model_dump(mode="json")
    origin = {".".join(path): config.origin.get(".".join(path), DEFAULT) for path, _ in _leaves(values)}
    return {"config": values, "origin": origin}


def from_resolved(values: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads back what `resolved` gave, origins included, with `a.b=c` strings on top. Raises ConfigError where this
    version cannot obey it."""
    if not isinstance(values, dict) or not all(isinstance(values.get(part), dict) for part in ("config", "origin")):
        found = ", ".join(values) if isinstance(values, dict) else f"{values!r:.80}"
        raise ConfigError("config.json is not a resolved config", found=found, fix="a new run directory")
    tables = copy.deepcopy(values["config"])
    origin = {key: where for key, where in values["origin"].items() if where != DEFAULT}
    # A setting this version does not know had an origin under the version that wrote it; name the file at least.
    named = {".".join(path): "config.json" for path, _ in _leaves(tables)} | origin
    _add_overrides(tables, overrides, named)
    origin |= {key: where for key, where in named.items() if where == COMMAND_LINE}
    return _with_origin(_build(tables, named), origin)


def to_toml(config: RunConfig) -> str:
    """The resolved config as a TOML file that loads back to equal settings, each line with its origin as a comment.

    A value of None is left out, or written as "none" where leaving it out would mean something else.
    """
    lines: list[str] = []
    for section, table in config.model_dump(mode="json").items():
        fields = type(getattr(config, section)).model_fields
        absent = {name for name, value in table.items() if value is None and fields[name].default is None}
        table = {name: table[name] for name in sorted(table, key="name".__ne__) if name not in absent}
        inner = {name: table.pop(name) for name, value in list(table.items()) if value and isinstance(value, dict)}
        if table or not inner:
            lines += _toml_table((section,), table, config.origin)
        for name, entries in inner.items():
            lines += _toml_table((section, name), entries, config.origin)
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """JSON schema of a config file, for editors. `extends` is allowed and nothing is required."""
    schema = _schema_for_toml(RunConfig.model_json_schema())
    extends = {"type": "string", "description": "a TOML file, relative to this one, whose settings come first"}
    return schema | {"properties": {"extends": extends} | schema["properties"]}


# --- layers ---------------------------------------------------------------------------------------------------------


def _file_layers(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[str, Tables]]:
    """(file name, its tables), root of the `extends` chain first; `above` are the files that led here."""
    if os.path.realpath(path) in map(os.path.realpath, above):  # Path.resolve raises where links go in a circle
        raise ConfigError(f"{path} extends itself", found=" -> ".join(map(str, (*above, path))))
    layer = _read(path, above)
    if "extends" not in layer:
        return [(str(path), layer)]
    below = layer.pop("extends")
    if not isinstance(below, str):
        raise _refused("extends", below, str(path), "a string (one file name)")
    return [*_file_layers(path.parent / below, (*above, path)), (str(path), layer)]


def _read(path: Path, above: tuple[Path, ...]) -> Tables:
    extended = f" (extended by {above[-1]})" if above else ""
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        there = sorted(file.name for file in path.parent.glob("*.toml"))
        close = difflib.get_close_matches(path.name, there, 1)
        raise ConfigError(
            f"there is no config file {path}{extended}",
            found=", ".join(there) or f"no TOML file in {path.parent}",
            fix=str(path.with_name(close[0])) if close else "",
        ) from None
    except OSError as error:
        raise ConfigError(f"config file {path}{extended} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}{extended} is not TOML: {error}") from None


def _add_layer(tables: Tables, layer: Tables, origin: Origin, where: str) -> None:
    for section, table in layer.items():
        earlier = tables.get(section)
        if isinstance(earlier, dict) and _renames(section, earlier, table):
            tables[section] = {}
            for key in [key for key in origin if key.startswith(f"{section}.")]:
                del origin[key]
    _merge(tables, layer, origin, where)


def _renames(section: str, earlier: Tables, table: Any) -> bool:
    """Whether `table` picks another class (model.name, optimizer.name) than the earlier layers: theirs is dropped."""
    before = earlier.get("name", _default_name(section))
    return before is not None and isinstance(table, dict) and table.get("name", before) != before


def _merge(tables: Tables, layer: Tables, origin: Origin, where: str, prefix: str = "") -> None:
    for name, value in layer.items():
        origin[prefix + name] = where
        if isinstance(value, dict):
            if not isinstance(tables.get(name), dict):
                tables[name] = {}
            _merge(tables[name], value, origin, where, f"{prefix}{name}.")
        else:
            tables[name] = value


def _add_overrides(tables: Tables, overrides: Sequence[str], origin: Origin) -> None:
    """`--set` strings, parsed by the types of the class they end up in: names first, whatever the order was typed."""
    pairs: list[tuple[KeyPath, str]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {override!r} is not KEY=VALUE", fix="--set train.steps=100")
        pairs.append((tuple(key.strip().split(".")), text.strip()))
    for path, text in sorted(pairs, key=lambda pair: pair[0][1:] != ("name",)):
        value = _parse_override(path, text, tables, origin)
        for name in reversed(path):
            value = {name: value}
        _add_layer(tables, value, origin, COMMAND_LINE)


def _parse_override(path: KeyPath, text: str, tables: Tables, origin: Origin) -> Any:
    key = ".".join(path)
    annotation = _find(path, tables, origin | {key: COMMAND_LINE})
    if path[1:] == ("name",) and _default_name(path[0]):
        return text  # the type found is the earlier layers' class, which knows only its own name
    if _is_table(annotation):
        inside = "NAME" if get_origin(annotation) is dict else next(iter(annotation.model_fields))
        raise ConfigError(f"{key}={text!r} (from --set): {key} is a section, not a value", fix=f"{key}.{inside}=...")
    try:
        return _parse(annotation, text)
    except ValidationError as error:
        raise _refused(key, text, COMMAND_LINE, _expectation(error.errors(include_url=False)[0])) from None


def _parse(annotation: Any, text: str) -> Any:
    """A string by its type: `none`, one of the choices, a list `3,4` or `[3,4]`, else as pydantic reads strings."""
    choices = _alternatives(annotation)
    if text.lower() == NONE and NoneType in choices:
        return None
    literals = {str(choice): choice for choice in _literals(annotation)}
    if text in literals:
        return literals[text]
    lists = [choice for choice in choices if get_origin(choice) is tuple]
    bracketed = text.startswith("[") and text.endswith("]")
    if lists and (bracketed or str not in choices):
        items = (item.strip().strip("\"'") for item in (text[1:-1] if bracketed else text).split(","))
        return [_parse(get_args(lists[0])[0], item) for item in items if item]
    return TypeAdapter(annotation).validate_strings(text)


# --- what the schema knows ------------------------------------------------------------------------------------------


def _default_name(section: str) -> str | None:
    """The class a section has unless its table says another; None where there is only one."""
    field = RunConfig.model_fields.get(section)
    return getattr(field.default, "name", None) if field else None


def _section_class(section: str, tables: Tables, origin: Origin) -> type[Settings]:
    annotation = RunConfig.model_fields[section].annotation
    table = tables.get(section)
    if _default_name(section) is None or not isinstance(table, dict):
        return type(RunConfig.model_fields[section].default)
    classes = {choice.model_fields["name"].default: choice for choice in _alternatives(annotation)}
    name = table.get("name", _default_name(section))
    if not isinstance(name, str) or name not in classes:
        raise _refused(f"{section}.name", name, origin[f"{section}.name"], " or ".join(map(repr, classes)))
    return classes[name]


def _find(path: KeyPath, tables: Tables, origin: Origin) -> Any:
    """The type of the setting or section at a path, or a ConfigError that says what there is instead."""
    where = origin[".".join(path)]
    section, *inner = path
    if section not in RunConfig.model_fields:
        raise _unknown(path[:1], RunConfig.model_fields, where)
    if not inner:
        return _section_class(section, tables, origin)
    fields = _section_class(section, tables, origin).model_fields
    if inner[0] not in fields:
        raise _unknown(path[:2], fields, where)
    annotation = fields[inner[0]].annotation
    below = inner[1:]
    if get_origin(annotation) is dict and below:
        annotation = get_args(annotation)[1]
        below = below[1:]
    if below:
        value = ".".join(path[: -len(below)])
        raise ConfigError(f"unknown key {'.'.join(path)} (from {where}): {value} is a value, not a section")
    return annotation


def _is_table(annotation: Any) -> bool:
    return get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, Settings))


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a (nested, annotated) union, or the one type that it is."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [choice for member in get_args(annotation) for choice in _alternatives(member)]
    return [annotation]


def _literals(annotation: Any) -> list[Any]:
    literals = [choice for choice in _alternatives(annotation) if get_origin(choice) is Literal]
    return [value for literal in literals for value in get_args(literal)]


def _leaves(tables: Tables, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """(path, value) of everything that is not a table with something in it."""
    for name, value in tables.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


# --- validation and its words ---------------------------------------------------------------------------------------


def _build(tables: Tables, origin: Origin) -> RunConfig:
    values: Tables = {}
    for path, value in _leaves(tables):
        key = ".".join(path)
        annotation = _find(path, tables, origin)
        if _is_table(annotation) and not isinstance(value, dict):
            raise _refused(key, value, origin[key], f"a section: write [{key}]")
        if isinstance(value, bool) and (choices := _literals(annotation)):  # pydantic takes true for 1
            raise _refused(key, value, origin[key], " or ".join(map(repr, choices)))
        if value == NONE and NoneType in _alternatives(annotation):
            value = None
        table = values
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = value
    for section, table in values.items():
        if name := _default_name(section):
            table.setdefault("name", name)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _in_our_words(error, values, origin) from None


def _with_origin(config: RunConfig, origin: Origin) -> RunConfig:
    settings = {".".join(path) for path, _ in _leaves(config.model_dump())}
    config.origin.update({key: where for key, where in origin.items() if key in settings})
    return config


def _in_our_words(error: ValidationError, values: Tables, origin: Origin) -> ConfigError:
    """pydantic's first complaint as one line that names key, value and origin."""
    first, *others = error.errors(include_url=False)
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        named = dict.fromkeys(key for key in re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text) if key in origin)
        where = ", ".join(f"{key} from {origin[key]}" for key in named)
        return ConfigError(f"{text} ({where or 'from ' + ', '.join(dict.fromkeys(origin.values()))})")
    key, value = _located(first["loc"], values)
    members = [first, *(other for other in others if _located(other["loc"], values)[0] == key)]  # of a union, or one
    return _refused(key, value, origin[key], *dict.fromkeys(map(_expectation, members)))


def _located(loc: tuple[int | str, ...], values: Tables) -> tuple[str, Any]:
    """Dotted key and value at a pydantic location, which also holds tags of unions and places in lists."""
    path: list[str] = []
    value: Any = values
    for part in loc:
        if isinstance(value, dict) and part in value:
            path.append(str(part))
            value = value[part]
    return ".".join(path), value


def _expectation(error: Any) -> str:
    """What pydantic wanted, in words of TOML."""
    words = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "a string", "tuple": "a list"}
    kind = error["type"].removesuffix("_type").removesuffix("_parsing")
    return words.get(kind) or error["msg"].removeprefix("Input should be ")


def _refused(key: str, value: Any, where: str, *expected: str) -> ConfigError:
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    choices = re.findall(r"'([^']*)'", expected[0])
    close = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
    hint = f", did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"{key}={shown} (from {where}) must be {' or '.join(expected)}{hint}")


def _unknown(path: KeyPath, names: Sequence[str], where: str) -> ConfigError:
    """Names the nearest key there, else where a key of that name is: `--set steps=3` wants train.steps."""
    *section, name = path
    owners = [
        (other, choice.model_fields.get("name"))
        for other, field in RunConfig.model_fields.items()
        for choice in _alternatives(field.annotation)
        if name in choice.model_fields
    ]
    close = difflib.get_close_matches(name, names, 1)
    if classes := [f"{other}.name={field.default!r}" for other, field in owners if field and [other] == section]:
        hint = f", which {' or '.join(classes)} has"
    elif close or owners:
        meant = [".".join((*section, *close))] if close else dict.fromkeys(f"{other}.{name}" for other, _ in owners)
        hint = f", did you mean {' or '.join(meant)}?"
    else:
        hint = ""
    there = f"[{section[0]}]" if section else "sections"
    return ConfigError(f"unknown key {'.'.join(path)} (from {where}){hint}", found=f"{there}: {', '.join(names)}")


# --- writing --------------------------------------------------------------------------------------------------------


def _toml_table(path: KeyPath, table: Tables, origin: Origin) -> list[str]:
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
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON and TOML write numbers, booleans and strings alike, but for the one control character JSON leaves alone.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _schema_for_toml(node: Any) -> Any:
    """pydantic's schema, but: null is "none", a section without `name` may be any of its classes, no default tables."""
    if isinstance(node, list):
        return [_schema_for_toml(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node == {"type": "null"}:
        return {"const": NONE}
    kept = {key: value for key, value in node.items() if key != "discriminator"}
    if "default" in kept and (kept["default"] is None or isinstance(kept["default"], dict)):
        del kept["default"]
    return {"anyOf" if key == "oneOf" else key: _schema_for_toml(value) for key, value in kept.items()}
