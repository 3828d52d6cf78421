"""Prints the settings of a published model as TOML, for a look before any weights are read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmdtrain.config.load import from_resolved
from spmdtrain.config.published.longest import check_longest
from spmdtrain.config.published.read_config import NAME, read_published


def model_toml(folder: str | Path, overrides: Sequence[str] = ()) -> str:
    """Returns the [model] section of a published model, with `a.b=c` strings applied on top."""
    published = read_published(Path(folder))
    sections = {"model": published.settings, "train": {"sequence_length": 1}}
    config = from_resolved({"config": sections, "origin": {}}, overrides)
    check_longest(published, config)
    values = config.model.model_dump(mode="json", exclude_unset=True)
    values = {"name": values.pop("name")} | values  # the name comes first
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    plain = {name: value for name, value in values.items() if name not in tables}
    lines = [
        *published.remarks_as_comments(),
        f"[model]  # {published.folder / NAME}: {published.family}",
        *_lines(plain),
    ]
    for name, table in tables.items():
        lines.append("")
        lines.append(f"[model.{name}]")
        lines.extend(_lines(table))
    return "\n".join(lines)


def _lines(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
