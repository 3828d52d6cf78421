"""Chooses the layouts of a certificate: those of the run, smaller, and every pair of axes.

A ring of two devices is its own mirror image: data sent round it the wrong way still arrives in the
right place. So each axis that is longer in the real run occurs once with 4 devices, and so does
each other axis that passes data round a ring.

In the built-in schedules nearly all stages work whenever one does, and little has to wait. In that
of uneven.csv activations, cotangents and deferred weight gradients wait, and stages idle between
their forwards, their backwards and their weight gradients.
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
    f"rules.{rule}="
    for rule in ("parameters.kv_heads", "activations.kv_heads", "activations.heads")
)


@dataclass(frozen=True)
class Layout:
    """A layout as settings, and why: as configured, ring of 4, pairs of axes, drawn, given."""

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
        """The settings as this machine can apply them: uneven.csv is the one installed here, unless
        the working directory has a file of that name.
        """
        key, _, name = UNEVEN.partition("=")
        here = Path(__file__).with_name(name)
        is_here = not Path(name).exists()
        return tuple(
            f"{key}={here}" if text == UNEVEN and is_here else text for text in self.settings
        )

    @property
    def has_stages(self) -> bool:
        """True if it has a pipeline, which delayed scaling refuses."""
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
    """Returns the layouts to try for the real run `config`, the most revealing ones first.

    With `only_asked`, only the axes that it uses.
    """
    axes = [axis for axis, size in config.mesh.sizes.items() if size != 1]
    layouts = [*_as_configured(config, axes), *_rings(config, axes)]
    if not only_asked or not layouts:
        layouts += list(_pairs(config))
    if config.precision.scaling == "delayed":
        layouts = [layout for layout in layouts if not layout.has_stages and not layout.has_pieces]
    by_settings: dict[tuple[str, ...], Layout] = {}
    for layout in layouts:
        by_settings.setdefault(tuple(sorted(layout.settings)), layout)
    return list(by_settings.values())


def _as_configured(config: RunConfig, axes: list[str]) -> Iterator[Layout]:
    """Yields the run's axes with 2 devices each, three at a time, so that every pair meets."""
    group_size = int(math.log2(DEVICES))
    groups = [tuple(axes)] if len(axes) <= group_size else _triples(axes, group_size)
    for group in groups:
        if group:
            yield Layout(_settings(config, dict.fromkeys(group, 2)), "as configured")


def _triples(axes: list[str], size: int) -> list[tuple[str, ...]]:
    """Returns a small set of groups of axes, chosen greedily, that together contain every pair."""
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


def _rings(config: RunConfig, axes: list[str]) -> Iterator[Layout]:
    """Yields a layout for each axis longer than 2: 4 devices along it, 2 along another axis."""
    for axis in axes:
        if config.mesh.sizes[axis] in (1, 2):
            continue
        others = [other for other in axes if other != axis]
        beside = others[-1] if others else ("data" if axis != "data" else "tensor")
        sizes = {name: {axis: 4, beside: 2}[name] for name in AXES if name in (axis, beside)}
        yield Layout(_settings(config, sizes), "ring of 4")


def _settings(config: RunConfig, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the settings of a layout with this mesh, and those of the run that fit it."""
    stages = sizes.get("pipeline", 1)
    train, pipeline = config.train, config.pipeline
    settings = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    shards = batch_shards(dict.fromkeys(AXES, 1) | dict(sizes))
    if train.microbatch or stages > 1:
        settings.append(f"train.microbatch={_microbatch(shards, stages)}")
    if train.zero:
        settings.append("train.zero=1")
    schedule = "1f1b" if pipeline.is_file else pipeline.schedule
    if stages > 1:
        settings.append(f"pipeline.schedule={schedule}")
        if pipeline.chunks > 1:
            settings.append("pipeline.chunks=2")
    if train.remat != "none" and not (stages > 1 and schedule == "zero_bubble"):
        settings.append(f"train.remat={train.remat}")
    if config.mesh.collective_matmul and sizes.get("tensor", 1) > 1:
        settings += COLLECTIVE
    return tuple(settings)


def _microbatch(shards: int, stages: int) -> int:
    """Returns the largest microbatch that makes several; if possible, a multiple of the stages."""
    here = BATCH // shards
    sizes = [size for size in range(here, 0, -1) if here % size == 0 and here // size > 1]
    fitting = [size for size in sizes if here // size % stages == 0]
    return next(iter(fitting or sizes), 1)


def _pairs(config: RunConfig) -> Iterator[Layout]:
    """Yields a fixed set of layouts with every pair of axes, every schedule and every remat.

    If the run leaves the choice, every method of attention over `context` occurs as well.
    """
    is_free = config.model.context_attention == "auto"
    for settings in (*(text.split() for text in _FIXED), [*_UNEVEN.split(), UNEVEN]):
        if not is_free:
            settings = [
                setting
                for setting in settings
                if not setting.startswith("model.context_attention=")
            ]
        yield Layout(tuple(settings), "pairs of axes")


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
    """Returns the layouts, with whole heads wherever `tensor` does not divide the key heads.

    A model certified as it is may have fewer key heads than `tensor` has devices; its other weights
    are still split. Layouts that set a rule for heads stay as they are. `small` is the certified
    run, on one device.
    """

    def fits(layout: Layout) -> bool:
        sizes = [text.partition("=")[2] for text in layout.settings if _axis_of(text) == "tensor"]
        has_rule = any(text.startswith(WHOLE_HEADS[0]) for text in layout.settings)
        return has_rule or all(small.model.kv_heads % int(size) == 0 for size in sizes)

    return [
        layout if fits(layout) else replace(layout, settings=(*layout.settings, *WHOLE_HEADS))
        for layout in layouts
    ]


def parse_layouts(lines: Iterable[str]) -> list[Layout]:
    """Returns the layouts of a file: one per line, settings separated by spaces, # for comments."""
    texts = (line.partition("#")[0].split() for line in lines)
    return [Layout(tuple(text), "given") for text in texts if text]
