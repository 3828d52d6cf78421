"""Chooses the layouts that a certificate covers: first those that the run asks for, with each axis
shortened, then some in which every pair of axes meets.

A ring of two is its own mirror: data sent round it in the wrong direction arrives in the right
place. So each axis that is longer in the real run, and each other axis that passes data round a
ring, occurs once with 4 devices.

In the schedules that are built here nearly all stages work whenever one does, and little waits. In
that of uneven.csv activations, cotangents and deferred weight gradients wait, and stages idle
between their forwards, their backwards and their weight gradients.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spmdtrain.config import RunConfig
from spmdtrain.config.schema import MeshConfig
from spmdtrain.lab.certify.shrink import BATCH
from spmdtrain.parallel.axes import BATCH_AXES, batch_shards

DEVICES = 8
AXES = tuple(MeshConfig().sizes)
STREAM = "rules.activations.stream_time=context,tensor"
COLLECTIVE = ("mesh.collective_matmul=true", STREAM)
UNEVEN = "pipeline.schedule=uneven.csv"  # the file beside this one, wherever it is installed
WHOLE_HEADS = tuple(
    f"rules.{each}="
    for each in ("parameters.kv_heads", "activations.kv_heads", "activations.heads")
)


@dataclass(frozen=True)
class Layout:
    """A layout by its settings. `why`: as asked, ring of 4, pairs of axes, drawn or given."""

    settings: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        """The mesh in words, and its other settings."""
        mesh = [text for text in self.settings if _axis_of(text)]
        rest = [text for text in self.settings if not _axis_of(text)]
        axes = " x ".join(f"{_axis_of(text)} {text.partition('=')[2]}" for text in mesh)
        others = (_spoken(text) for text in rest)
        return ", ".join(filter(None, (axes or "one device", *others)))

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as this machine can apply them, with the path of the schedule beside this
        file unless the working directory has one of its name.
        """
        key, _, name = UNEVEN.partition("=")
        here = Path(__file__).with_name(name)
        is_here = not Path(name).exists()
        return tuple(
            f"{key}={here}" if text == UNEVEN and is_here else text for text in self.settings
        )

    @property
    def has_stages(self) -> bool:
        """True if it has a pipeline, which model.multi_token and delayed scaling refuse."""
        return any(_axis_of(text) == "pipeline" for text in self.settings)

    @property
    def has_pieces(self) -> bool:
        """True if its matmuls are in pieces, which delayed scaling refuses."""
        return COLLECTIVE[0] in self.settings

    @property
    def cuts_batch(self) -> bool:
        """True if a device sees a part of the batch at a time: by an axis, or by microbatches."""
        axes = {_axis_of(text) for text in self.settings}
        return not axes.isdisjoint(BATCH_AXES) or any(
            text.startswith("train.microbatch=") for text in self.settings
        )

    @property
    def devices(self) -> int:
        """The number of devices that it takes."""
        sizes = (int(text.partition("=")[2]) for text in self.settings if _axis_of(text))
        return math.prod(sizes)


def _axis_of(text: str) -> str:
    section, _, rest = text.partition("=")[0].partition(".")
    return rest if section == "mesh" and rest in AXES else ""


def _spoken(text: str) -> str:
    key, _, value = text.partition("=")
    if key == "rules.activations.stream_time" or text in WHOLE_HEADS[1:]:
        return ""
    if text == WHOLE_HEADS[0]:
        return "heads whole"
    if key == "mesh.collective_matmul":
        return "collective matmul"
    if key == "pipeline.schedule":
        return Path(value).stem
    if key == "model.context_attention":
        return value
    return f"{key.rpartition('.')[2]} {value}"


def cover(config: RunConfig, *, only_asked: bool = False) -> list[Layout]:
    """Returns the layouts of a run, the most telling ones first.

    `config`: the real run. `only_asked`: only the axes that it uses.
    """
    asked = [axis for axis, size in config.mesh.sizes.items() if size != 1]
    found = [*_as_configured(config, asked), *_rings(config, asked)]
    if not only_asked or not found:
        found += list(_pairs(config))
    if config.model.multi_token is not None:
        found = [layout for layout in found if not layout.has_stages]
    if config.precision.scaling == "delayed":
        found = [each for each in found if not each.has_stages and not each.has_pieces]
    seen: dict[tuple[str, ...], Layout] = {}
    for layout in found:
        seen.setdefault(tuple(sorted(layout.settings)), layout)
    return list(seen.values())


def _as_configured(config: RunConfig, asked: list[str]) -> Iterator[Layout]:
    """Yields the asked axes with 2 devices each; three at a time, so that every pair meets."""
    most = int(math.log2(DEVICES))
    groups = [tuple(asked)] if len(asked) <= most else _triples(asked, most)
    for group in groups:
        if group:
            yield Layout(_settings(config, dict.fromkeys(group, 2)), "as configured")


def _triples(axes: list[str], size: int) -> list[tuple[str, ...]]:
    """Returns few groups of axes, chosen greedily, such that every pair is in one."""
    missing = set(itertools.combinations(axes, 2))
    groups = []
    while missing:
        best = max(
            itertools.combinations(axes, size),
            key=lambda group: len(missing & set(itertools.combinations(group, 2))),
        )
        groups.append(best)
        missing -= set(itertools.combinations(best, 2))
    return groups


def _rings(config: RunConfig, asked: list[str]) -> Iterator[Layout]:
    """Yields a layout for each axis of more than 2: 4 devices along it, and 2 along another axis of
    the run.
    """
    for axis in asked:
        if config.mesh.sizes[axis] in (1, 2):
            continue
        others = [each for each in asked if each != axis]
        beside = others[-1] if others else ("data" if axis != "data" else "tensor")
        sizes = {each: {axis: 4, beside: 2}[each] for each in AXES if each in (axis, beside)}
        yield Layout(_settings(config, sizes), "ring of 4")


def _settings(config: RunConfig, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns a layout with this mesh, and the run's own choices that fit it."""
    stages = sizes.get("pipeline", 1)
    train, pipeline = config.train, config.pipeline
    found = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    shards = batch_shards(dict.fromkeys(AXES, 1) | dict(sizes))
    if train.microbatch or stages > 1:
        found.append(f"train.microbatch={_microbatch(shards, stages)}")
    if train.zero:
        found.append("train.zero=1")
    schedule = "1f1b" if pipeline.is_file else pipeline.schedule
    if stages > 1:
        found.append(f"pipeline.schedule={schedule}")
        if pipeline.chunks > 1:
            found.append("pipeline.chunks=2")
    if train.remat != "none" and not (stages > 1 and schedule == "zero_bubble"):
        found.append(f"train.remat={train.remat}")
    if config.mesh.collective_matmul and sizes.get("tensor", 1) > 1:
        found += COLLECTIVE
    return tuple(found)


def _microbatch(shards: int, stages: int) -> int:
    """Returns the largest microbatch that leaves several, a multiple of the stages if it can."""
    here = BATCH // shards
    sizes = [size for size in range(here, 0, -1) if here % size == 0 and here // size > 1]
    fitting = [size for size in sizes if here // size % stages == 0]
    return next(iter(fitting or sizes), 1)


def _pairs(config: RunConfig) -> Iterator[Layout]:
    """Yields a fixed set of layouts in which every pair of axes meets, and every schedule and remat
    occurs.

    So do all ways of attention over `context`, if the run leaves the choice.
    """
    is_free = config.model.context_attention == "auto"
    for found in (*(text.split() for text in _FIXED), [*_UNEVEN.split(), UNEVEN]):
        if not is_free:
            found = [each for each in found if not each.startswith("model.context_attention=")]
        yield Layout(tuple(found), "pairs of axes")


_FIXED = (
    "mesh.pipeline=2 mesh.data=2 mesh.tensor=2 train.zero=1 train.microbatch=2",
    f"mesh.context=2 mesh.tensor=4 {' '.join(COLLECTIVE)}",
    "mesh.fsdp=4 mesh.context=2 train.remat=full model.context_attention=ulysses",
    "mesh.pipeline=2 mesh.fsdp=2 mesh.expert=2 train.microbatch=3 pipeline.schedule=interleaved "
    "pipeline.chunks=2",
    "mesh.data=2 mesh.fsdp=2 mesh.tensor=2 train.zero=1 train.microbatch=1",
    "mesh.pipeline=2 mesh.fsdp=2 mesh.context=2 train.microbatch=2 pipeline.schedule=zero_bubble",
    f"mesh.data=2 mesh.context=2 mesh.tensor=2 train.remat=dots {' '.join(COLLECTIVE)}",
    "mesh.data=2 mesh.expert=2 mesh.tensor=2 train.microbatch=3 train.remat=dots",
    "mesh.pipeline=4 mesh.data=2 train.microbatch=3 pipeline.schedule=gpipe",
    "mesh.data=3 mesh.fsdp=2 train.zero=1",
    "mesh.expert=2 mesh.context=4 train.microbatch=3 model.context_attention=gather",
)
# The sizes of the file: 3 stages, 2 chunks, 3 microbatches.
_UNEVEN = "mesh.pipeline=3 mesh.fsdp=2 train.microbatch=4 pipeline.chunks=2"


def fitted(layouts: Sequence[Layout], small: RunConfig) -> list[Layout]:
    """Returns the layouts with heads left whole if `tensor` does not divide those of the keys.

    A model that is certified as it is may have fewer of them than the ring has devices. Its other
    weights are still split over the ring. Layouts with a rule of their own for heads stay.
    `small`: the run that is certified, on one device.
    """

    def fits(layout: Layout) -> bool:
        sizes = [text.partition("=")[2] for text in layout.settings if _axis_of(text) == "tensor"]
        has_rule = any(text.startswith(WHOLE_HEADS[0]) for text in layout.settings)
        return has_rule or all(small.model.kv_heads % int(size) == 0 for size in sizes)

    return [
        layout if fits(layout) else replace(layout, settings=(*layout.settings, *WHOLE_HEADS))
        for layout in layouts
    ]


def given(lines: Iterable[str]) -> list[Layout]:
    """Returns the layouts of a file, one per line: settings separated by blanks. # begins a
    comment.
    """
    texts = (line.partition("#")[0].split() for line in lines)
    return [Layout(tuple(text), "given") for text in texts if text]
