"""Words pydantic's refusal of a setting as one line."""

from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.near import did_you_mean


def refusal_in_python(kind: str, fields: Collection[str], error: ValidationError) -> ConfigError:
    """Returns the error for the first wrong keyword of a class of settings.

    `kind` is the name of the class, and `fields` are its fields.
    """
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "value_error" and cause is not None:  # from the schema's own checks
        return ConfigError(str(cause))
    where = [str(part) for part in first["loc"]]
    if where[:1] in (["model"], ["optimizer"]) and len(where) > 2:
        del where[1]  # the name of the class, between the section and its field
    key = ".".join(where)
    if first["type"].startswith("union_tag"):
        return ConfigError(
            f"{key} needs the name of one of its classes", fix=f"{key}={{'name': ...}}"
        )
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(key, fields) if len(first["loc"]) == 1 else ""
        return ConfigError(f"{kind} has no setting {key}{hint}")
    if first["type"] == "missing":
        return ConfigError(f"{kind} needs {key}")
    value = shown(first["input"])
    return ConfigError(f"{key or kind}={value} must be {expectation(first)}")


def expectation(error: Any) -> str:
    """Returns the kind of value that pydantic expected, in TOML's terms."""
    words = {
        "int": "an integer",
        "float": "a number",
        "bool": "true or false",
        "string": "a string",
        "tuple": "a list",
        "int_parsing_size": "an integer of fewer digits",
    }
    kind = error["type"].removesuffix("_type").removesuffix("_parsing")
    return words.get(kind) or error["msg"].removeprefix("Input should be ")
