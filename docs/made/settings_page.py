"""Makes the page of settings of the config schema."""

from types import UnionType
from typing import Any, Union, get_args, get_origin

from spmdtrain.config import RunConfig
from spmdtrain.config.schema import Settings

PAGE = "settings.md"
INTRODUCTION = """# Settings

This page is made by `make pages` from the classes in `spmdtrain/config/schema/`.

A run is described by a TOML file. Each heading below is a section of that file, and each row is \
a setting in it.
On the command line the same setting is written `--set section.setting=value`. The word `none` \
stands for no value.
`spmdtrain train CONFIG --print-config` shows every value of a run and where it came from, and \
`configs/schema.json`
lets an editor complete the files.
"""


def page() -> str:
    """The whole page as Markdown."""
    sections = (
        section(name, classes_of(field.annotation))
        for name, field in RunConfig.model_fields.items()
    )
    return "\n".join([INTRODUCTION, *sections])


def classes_of(annotation: Any) -> list[type[Settings]]:
    """The classes that a section may have: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [each for member in get_args(annotation) for each in classes_of(member)]


def section(name: str, classes: list[type[Settings]]) -> str:
    """One section: the text of each class that may fill it, then a row for every setting that any
    of them has.
    """
    lines = [f"## `[{name}]`", ""]
    for each in classes:
        if text := (each.__doc__ if "__doc__" in vars(each) else None):
            lines += [" ".join(text.split()), ""]
    properties = [each.model_json_schema()["properties"] for each in classes]
    titles = [
        each.model_fields["name"].default if len(classes) > 1 else "default" for each in classes
    ]
    lines.append("| setting | value | " + " | ".join(titles) + " | meaning |")
    lines.append("|---|---|" + "---|" * len(classes) + "---|")
    keys = dict.fromkeys(key for of_class in properties for key in of_class)
    keys = sorted(keys, key=lambda key: key != "name")  # what decides over the others comes first
    for key in keys:
        having = next(of_class[key] for of_class in properties if key in of_class)
        names = [repr(title) for title in titles] if key == "name" else []
        value = " or ".join(names) or kind_of(having)
        defaults = [default_of(of_class.get(key)) for of_class in properties]
        cells = [f"`{key}`", value, *defaults, having.get("description", "")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    text = "\n".join([*lines, ""])
    # A table inside the section has a heading of its own.
    inner = {
        f"{name}.{key}": of_class
        for each in classes
        for key, field in each.model_fields.items()
        for of_class in classes_of(field.annotation)
        if get_origin(field.annotation) in (Union, UnionType)
    }
    return "\n".join([text, *(section(key, [of_class]) for key, of_class in inner.items())])


def default_of(schema: dict[str, Any] | None) -> str:
    """The default as one would write it in TOML, or a dash where the class has no such setting."""
    if schema is None:
        return "-"
    if "default" not in schema:
        return "required"
    default = schema["default"]
    if default is None:
        return "`none`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def kind_of(schema: dict[str, Any]) -> str:
    """What a value may be, in words."""
    if "anyOf" in schema:
        return " or ".join(kind_of(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema.get("type"):
        case "null":
            return "`none`"
        case "boolean":
            return "`true` or `false`"
        case "integer" | "number":
            return number_of(schema)
        case "array":
            item = kind_of(schema.get("items", {}))
            return f"list of {item}s" if item.isalpha() else f"list, each {item}"
        case "object":
            return "table"
        case "string":
            return "string"
        case _:
            return "table" if "$ref" in schema else "value"


def number_of(schema: dict[str, Any]) -> str:
    whole = schema["type"] == "integer"
    bounds = []
    if "minimum" in schema:
        bounds.append(f"at least {schema['minimum']:g}")
    if "exclusiveMinimum" in schema:
        least = schema["exclusiveMinimum"]
        bounds.append(f"at least {least + 1:g}" if whole else f"above {least:g}")
    limit = schema.get("exclusiveMaximum")
    if limit is not None and limit < 2**31:  # larger bounds are those of int32 and of keys
        bounds.append(f"below {limit:g}")
    return ", ".join(["whole number" if whole else "number", *bounds])
