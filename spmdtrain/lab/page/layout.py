"""Shows the layout of a run on its devices: the mesh axes and the pipeline schedule."""

import re
from collections.abc import Iterable
from typing import Any

from spmdtrain.config.errors import UserError
from spmdtrain.lab.page.formats import safe
from spmdtrain.lab.page.read import RunRead

AXES = {
    "pipeline": "layers are split into stages",
    "data": "the batch is split, weights are copied",
    "fsdp": "the batch is split, weights are split too",
    "expert": "the batch and the experts are split",
    "context": "the sequence is split",
    "tensor": "heads, feed-forward and vocabulary are split",
}
MOST_OF_A_PICTURE = 40_000  # characters
MOST_UNITS = 400  # of a schedule that is drawn
COLOURS = {
    "#333333": "currentColor",
    "#222222": "currentColor",
    "#444444": "currentColor",
    "#777777": "var(--dim)",
    "#ffffff": "var(--soft)",
    "#f4f4f4": "var(--soft)",
}


def layout(run: RunRead) -> str:
    """Returns the mesh as a table, and the pipeline schedule as a picture."""
    sizes = mesh_sizes(run)
    if not sizes:
        return ""
    rows = "".join(
        f"<tr><th scope=row>{axis}</th><td class=num>{sizes[axis]}</td><td>{what}</td></tr>"
        for axis, what in AXES.items()
        if sizes.get(axis, 1) > 1
    )
    table = (
        "<div class=scroll><table class=mesh><thead><tr><th>axis</th><th class=num>devices</th>"
        f"<th>what it splits</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return (table if rows else "<p>One device holds everything.</p>") + _pipeline(run, sizes)


def mesh_sizes(run: RunRead) -> dict[str, int]:
    """Returns the sizes of the mesh axes: those of the last start, or else of the config."""
    starts = [event["mesh"] for event in run.events if isinstance(event.get("mesh"), dict)]
    mesh = starts[-1] if starts else run.config.get("mesh")
    items = mesh.items() if isinstance(mesh, dict) else ()
    return {name: count for name, count in items if name in AXES and type(count) is int}


def _pipeline(run: RunRead, sizes: dict[str, int]) -> str:
    stages = sizes.get("pipeline", 1)
    shards = sizes.get("data", 1) * sizes.get("fsdp", 1) * sizes.get("expert", 1)
    kind = run.setting("pipeline", "schedule")
    chunks = run.setting("pipeline", "chunks", 1)
    batch = run.setting("train", "global_batch")
    microbatch = run.setting("train", "microbatch")
    numbers = (batch, microbatch, chunks)
    if stages < 2:
        return ""
    from spmdtrain.pipeline import schedule
    from spmdtrain.pipeline.draw import svg

    if kind not in schedule.SCHEDULE_KINDS or not _are_counts(numbers):
        return ""  # a schedule file may have been moved since
    microbatches = batch // max(microbatch * shards, 1)
    if not 0 < microbatches * stages * chunks <= MOST_UNITS:
        return ""
    try:
        picture = svg(schedule.build(kind, stages, microbatches, chunks))
    except UserError:  # a stranger's sizes
        return ""
    if len(picture) > MOST_OF_A_PICTURE:
        return ""
    words = f"{kind}: {stages} stages, {microbatches} microbatches"
    return f'<h3>Pipeline</h3><div class="scroll">{_themed(picture, words)}</div>'


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _themed(picture: str, words: str) -> str:
    """Returns a picture in the colours of the page, with a text alternative."""
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0]
    inner = picture[picture.index(">") + 1 :]
    inner = re.sub(r'<rect width="\d+" height="\d+" fill="#ffffff"/>', "", inner, count=1)
    for old, new in COLOURS.items():
        inner = inner.replace(f'"{old}"', f'"{new}"')
    return (
        f'<svg class="picture" viewBox="0 0 {width} {height}" style="width:{width}px" '
        f'fill="currentColor" font-size="11" role="img" aria-label="{safe(words)}">{inner}'
    )
