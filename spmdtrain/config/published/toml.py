"""The settings of a published model as TOML, to look at before anything is read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmdtrain.config.load import from_resolved
from spmdtrain.config.published.reading import NAME, read_published


def model_toml(folder: str | Path, overrides: Sequence[str] = ()) -> str:
    """Returns the section [model] of a published model, with `a.b=c` strings on top."""
    published = read_published(Path(folder))
    sections = {"model": published.settings, "train": {"sequence_length": 1}}
    config = from_resolved({"config": sections, "origin": {}}, overrides)
    values = config.model.model_dump(mode="json", exclude_unset=True)
    values = {"name": values.pop("name")} | values
    inner = {name: value for name, value in values.items() if isinstance(value, dict)}
    head = f"[model]  # {published.folder / NAME}: {published.family}"
    plain = {name: value for name, value in values.items() if name not in inner}
    lines = [*published.remarks_as_comments(), head, *_lines(plain)]
    for name, table in inner.items():
        lines += ["", f"[model.{name}]", *_lines(table)]
    return "\n".join(lines)


def _lines(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
