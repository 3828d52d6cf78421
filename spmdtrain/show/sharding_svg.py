"""Draws a run's mesh and shardings: `spmdtrain show CONFIG --svg FILE`.

One panel shows the mesh, one the tokens of a batch, and one panel each the distinct shardings of
parameters, by the largest parameter with that sharding. A cell is a part of the array; its numbers
are the devices that hold that part, according to jax's own sharding.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import jax

from spmdtrain.parallel.axes import axes_of_dim
from spmdtrain.parallel.mesh import device_ids
from spmdtrain.train.setup import Setup

MOST_ROWS = 16
MOST_COLUMNS = 8
PANELS_IN_A_ROW = 3

# Lengths in pixels.
MARGIN = 24
HEADER = 62
ROW = 22
TITLE = 44
CHARACTER = 6.2  # average width in the widest text, 11 pixels high
NARROWEST = 44  # column

MESH_FILL = "#e4e4e4"
BATCH_FILL = "#cfe8d3"
PARAMETER_FILL = "#cfdff2"

# Either kind of leaf: those of an abstract state, or arrays.
Shaped = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Panel:
    """A panel of the picture: a table with labels. `cells[row][column]` is the text of a cell."""

    title: str
    subtitle: str
    row_labels: Sequence[str]
    column_labels: Sequence[str]
    cells: Sequence[Sequence[str]]
    fill: str

    @property
    def height(self) -> int:
        return HEADER + ROW * min(len(self.cells), MOST_ROWS) + MARGIN

    @property
    def label_width(self) -> int:
        return 8 + _text_width(self.row_labels)

    @property
    def column_width(self) -> int:
        texts = itertools.chain(self.column_labels, *self.cells)
        return max(NARROWEST, 10 + _text_width(texts))

    @property
    def width(self) -> int:
        table = self.label_width + self.column_width * min(len(self.column_labels), MOST_COLUMNS)
        return max(table, _text_width([self.title, self.subtitle])) + MARGIN


def svg(setup: Setup) -> str:
    """Returns the picture of one setup: self-contained text of a few kB."""
    panels = [_mesh_panel(setup), _batch_panel(setup), *_parameter_panels(setup)]
    starts = range(0, len(panels), PANELS_IN_A_ROW)
    rows = [panels[start : start + PANELS_IN_A_ROW] for start in starts]
    heights = [max(panel.height for panel in row) for row in rows]
    widths = [
        max(panel.width for panel in panels[column::PANELS_IN_A_ROW])
        for column in range(PANELS_IN_A_ROW)
    ]
    lefts = [MARGIN + sum(widths[:column]) for column in range(PANELS_IN_A_ROW)]
    width = MARGIN + max(sum(widths), _text_width([_headline(setup)], size=15))
    height = TITLE + sum(heights)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="11" '
        'fill="#333333">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="26" font-size="15">{escape(_headline(setup))}</text>',
    ]
    top = TITLE
    for row, row_height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            parts += draw_panel(panel, lefts[column], top)
        top += row_height
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text_width(texts: Iterable[str], size: int = 11) -> int:
    return round(max(map(len, texts)) * CHARACTER * size / 11)


def _headline(setup: Setup) -> str:
    count = f"{setup.model.size:,} parameters"
    devices = f"{setup.mesh.size} device{'s' * (setup.mesh.size != 1)}"
    return f"{setup.config.model.name}, {count}, on {devices}: the numbers are those of the devices"


def _mesh_panel(setup: Setup) -> Panel:
    """Returns the panel of the mesh.

    With several split axes, the last one makes the columns. The others make the rows, the slowest
    link first.
    """
    mesh = setup.mesh
    active = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    across = active[-1] if len(active) > 1 else None
    down = [axis for axis in active if axis != across]
    columns = mesh.shape[across] if across else 1
    places = itertools.product(*(range(mesh.shape[axis]) for axis in down))
    return Panel(
        title="the mesh",
        subtitle=" x ".join(f"{axis} {mesh.shape[axis]}" for axis in active) or "one device",
        row_labels=[", ".join(map("{} {}".format, down, place)) for place in places],
        column_labels=[f"{across} {at}" if across else "" for at in range(columns)],
        cells=[
            [device_ids([device]) for device in row] for row in mesh.devices.reshape(-1, columns)
        ],
        fill=MESH_FILL,
    )


def _batch_panel(setup: Setup) -> Panel:
    tokens = setup.batch["tokens"]
    names = ("microbatch", "sequence", "token")
    return _array_panel("tokens of a batch", names, tokens, BATCH_FILL)


def _parameter_panels(setup: Setup) -> list[Panel]:
    """Returns a panel of the largest parameter for each sequence of mesh axes that splits one."""
    alike: dict[tuple, list[str]] = {}
    for path in setup.state.params:
        split = tuple(axes for part in setup.specs[path] if (axes := _split_axes(setup, part)))
        alike.setdefault(split, []).append(path)
    panels = []
    for paths in alike.values():
        largest = max(paths, key=lambda path: setup.model.parameters[path].size)
        others = len(paths) - 1
        title = largest.removeprefix("blocks.layer.") + (f" and {others} like it" if others else "")
        names = [axis or "" for axis in setup.model.parameters[largest].axes]
        panels.append(_array_panel(title, names, setup.state.params[largest], PARAMETER_FILL))
    return sorted(panels, key=lambda panel: -sum(map(len, panel.cells)))


def _split_axes(setup: Setup, part: Any) -> tuple[str, ...]:
    """Returns the mesh axes of more than one device that split one dim of a spec."""
    return tuple(axis for axis in axes_of_dim(part) if setup.mesh.shape[axis] > 1)


def _array_panel(title: str, names: Sequence[str], array: Shaped, fill: str) -> Panel:
    """Returns the panel of an array.

    With several split dims, the parts of the last one are the columns. The parts of the others are
    the rows.
    """
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True)
        )
        holders.setdefault(bounds, []).append(device)
    parts_of_dim: list[list[tuple[int, int]]] = [
        sorted(set(bounds)) for bounds in zip(*holders, strict=True)
    ]
    split = [dim for dim, parts in enumerate(parts_of_dim) if len(parts) > 1]

    def label(dim: int, bounds: tuple[int, int]) -> str:
        start, stop = bounds
        return f"{names[dim]} {start}..{stop - 1}" if stop > start + 1 else f"{names[dim]} {start}"

    across = split[-1] if len(split) > 1 else None
    down = [dim for dim in split if dim != across]
    row_places = list(itertools.product(*(parts_of_dim[dim] for dim in down)))
    column_places: Sequence[tuple[int, int] | None] = (
        parts_of_dim[across] if across is not None else [None]
    )

    def cell(row: Sequence[tuple[int, int]], column: tuple[int, int] | None) -> str:
        wanted = dict(zip(down, row, strict=True))
        if across is not None and column is not None:
            wanted[across] = column
        bounds = tuple(wanted.get(dim, parts[0]) for dim, parts in enumerate(parts_of_dim))
        return device_ids(holders[bounds])

    dims = [
        f"{name} {size}".strip() for name, size in zip(names, array.shape, strict=True) if size > 1
    ]
    return Panel(
        title=title,
        subtitle=" x ".join(dims) + ("" if split else ", whole on every device"),
        row_labels=[", ".join(map(label, down, row)) for row in row_places],
        column_labels=[
            "" if across is None or at is None else label(across, at) for at in column_places
        ],
        cells=[[cell(row, column) for column in column_places] for row in row_places],
        fill=fill,
    )


def draw_panel(panel: Panel, left: int, top: int) -> list[str]:
    """Returns the panel's lines of SVG.

    Rows and columns that exceed the largest picture are counted, not drawn.
    """
    rows = min(len(panel.cells), MOST_ROWS)
    columns = min(len(panel.column_labels), MOST_COLUMNS)
    width = panel.column_width
    parts = [
        f'<text x="{left}" y="{top + 14}" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{left}" y="{top + 30}" fill="#777777">{escape(panel.subtitle)}</text>',
    ]
    table_left = left + panel.label_width
    for column in range(columns):
        x = table_left + width * column + width // 2
        label = escape(panel.column_labels[column])
        parts.append(
            f'<text x="{x}" y="{top + 50}" font-size="9" text-anchor="middle">{label}</text>'
        )
    for row in range(rows):
        y = top + HEADER - 6 + ROW * row
        label = escape(panel.row_labels[row])
        parts.append(
            f'<text x="{table_left - 6}" y="{y + 14}" font-size="9" '
            f'text-anchor="end">{label}</text>'
        )
        for column in range(columns):
            x = table_left + width * column
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width - 2}" height="{ROW - 2}" '
                f'fill="{panel.fill}"/>'
            )
            middle = x + width // 2 - 1
            text = escape(panel.cells[row][column])
            parts.append(f'<text x="{middle}" y="{y + 14}" text-anchor="middle">{text}</text>')
    hidden = [f"{len(panel.cells) - rows} more rows"] if len(panel.cells) > rows else []
    if len(panel.column_labels) > columns:
        hidden.append(f"{len(panel.column_labels) - columns} more columns")
    if hidden:
        y = top + HEADER + ROW * rows + 6
        parts.append(
            f'<text x="{table_left}" y="{y}" fill="#777777">and {" and ".join(hidden)}</text>'
        )
    return parts
