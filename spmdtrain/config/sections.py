"""Walks over the sections of a run's settings and the tables in them, for what their classes say of
their settings.
"""

from collections.abc import Collection, Iterator
from typing import get_args, get_origin

from spmdtrain.config.schema import RunConfig
from spmdtrain.config.settings import Settings


def tables(section: type[Settings] = RunConfig, above: str = "") -> Iterator[tuple[str, type]]:
    """Yields (dotted name, class) of the tables in a section, and in those; not entries of lists.

    A table that may be of several classes comes with each of them.
    """
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) is tuple:
            continue
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield above + name, kind
                yield from tables(kind, f"{above}{name}.")


def listed(attribute: str) -> list[str]:
    """Returns the dotted names of the settings that their classes list under `attribute`.

    One that ends in a dot stands for all of a table, which lists "".
    """
    names = (f"{table}.{name}" for table, kind in tables() for name in getattr(kind, attribute))
    return list(dict.fromkeys(names))


def is_among(name: str, names: Collection[str]) -> bool:
    """Returns True if `names` have this setting, or a table that holds it."""
    return name in names or any(name.startswith(other) for other in names if other.endswith("."))
