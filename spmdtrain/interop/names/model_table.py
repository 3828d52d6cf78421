"""Makes the table of names of one model, of as many layers and experts as it has."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from spmdtrain.config.schema import LayerParts, LayerStack, TransformerConfig
from spmdtrain.interop import mxfp4
from spmdtrain.interop.names.entry import (
    FURTHER,
    LAYER,
    OURS,
    Entry,
    Part,
    Table,
    in_layers,
)
from spmdtrain.interop.names.expert_parts import LOAD_BIAS, NO_BIAS, Layouts
from spmdtrain.interop.names.family_names import NAMES
from spmdtrain.interop.names.layer_parts import INDEXER, PLAIN_QUERIES
from spmdtrain.interop.names.model_sizes import sizes_of
from spmdtrain.interop.names.spellings import spelled, spelling_of

OF_EXPERTS = ("mlp.up_xeu", "mlp.down_xfe")
SHARED = "mlp.shared."  # which a model may lack


class LayoutsInFiles(NamedTuple):
    """The numbers of the layouts that experts have: in the layers, and in blocks of further tokens.

    Where files hold experts of neither, or nothing was imported, it is the first.
    """

    layers: int = 0
    further: int = 0


FIRST = LayoutsInFiles()


def table_of(family: str, model: TransformerConfig, layout: LayoutsInFiles = FIRST) -> Table:
    """Returns the table of a family, for a model with as many experts and layers.

    `layout` is that of its experts: see `layout_of`.
    """
    table = {**NAMES[family].whole, **_further(family, model, layout.further)}
    for stack in model.stacks:
        table |= _of_stack(family, model, stack, layout.layers)
    return {**table, **_of_indexers(family, model)}


def _of_indexers(family: str, model: TransformerConfig) -> Table:
    """Returns the entries of [model.indexer], which have the indexers of all layers."""
    if model.indexer is None:
        return {}
    prefix = NAMES[family].prefix
    return {
        path: Entry(entry.rule, tuple(prefix + name for name in entry.names)).of_all(
            model.indexer_layers
        )
        for path, entry in INDEXER.items()
    }


def layout_of(family: str, model: TransformerConfig, names: Collection[str]) -> LayoutsInFiles:
    """Returns the layouts of experts that tensors with these names have."""
    with_experts = [number for number, mlp in enumerate(model.layer_mlps) if mlp == "experts"]
    if not with_experts:
        return FIRST
    in_layers = _layout_at(family, model, NAMES[family].prefix, with_experts[-1], names)
    further = NAMES[family].further
    in_further = [
        _layout_at(family, model, further.mlp_prefix or further.prefix, number, names)
        for number in further.numbers(model)
    ]
    return LayoutsInFiles(in_layers, *in_further[:1])


def _layout_at(
    family: str, model: TransformerConfig, prefix: str, number: int, names: Collection[str]
) -> int:
    """Returns the number of the layout that the experts of one layer have; the first if none has
    all of its tensors.
    """
    spelling = spelling_of(family, names)
    prefix = prefix.replace(LAYER, str(number))
    for place, part in enumerate(_layouts(family, model)):
        own = (entry for path, entry in part.items() if not path.startswith(SHARED))
        wanted = (name for entry in own for name in entry.of_experts(1).names)
        if all(spelled(prefix + name, spelling) in names for name in wanted):
            return place
    return 0


class LayerEntry(NamedTuple):
    """The tensors of one parameter, at our `path`, of the layer at `place` of its stack."""

    path: str
    place: int
    entry: Entry


def entries_of_layers(family: str, model: TransformerConfig) -> Iterator[LayerEntry]:
    """Yields the entries of all layers, one by one, without those of experts."""
    for stack in model.stacks:
        of_rounds = list(_of_rounds(family, model, stack.pattern, 0))
        for place in range(stack.rounds):
            for at, path, entry in of_rounds:
                if path.endswith(OF_EXPERTS):
                    continue
                numbered = entry._replace(first=stack.first + at, step=len(stack.pattern))
                names = numbered.of_layer(place)
                path_in_stack = path.replace(OURS, stack.path + ".layer.")
                yield LayerEntry(path_in_stack, place, Entry(entry.rule, names))


def _of_stack(family: str, model: TransformerConfig, stack: LayerStack, layout: int) -> Table:
    """Returns the entries of a stack: of each layer in `blocks`, and of all layers in others."""
    table = {}
    step = len(stack.pattern)
    count = model.experts.count if model.experts else 0
    for place, path, of_one_expert in _of_rounds(family, model, stack.pattern, layout):
        entry = of_one_expert.of_experts(count)
        first = stack.first + place
        own = path.replace(OURS, stack.path + ".layer.")
        if own == path:
            table[own] = entry._replace(first=first, step=step)
        else:
            table[own] = entry.of_all(range(first, stack.first + stack.layers, step))
    return table


def _of_rounds(
    family: str, model: TransformerConfig, pattern: Sequence[LayerParts], layout: int
) -> Iterator[tuple[int, str, Entry]]:
    """Yields (place in the round, our path, entry) of the layers of a round."""
    names, layouts = NAMES[family], _layouts(family, model)
    for place, layer in enumerate(pattern):
        of_mlp = layouts[layout] if layer.mlp == "experts" and layouts else names.mlp
        ours = f"block.{place}." if len(pattern) > 1 else ""
        of_layer = {**_layer(family, model), **of_mlp}
        for path, entry in in_layers(names.prefix, of_layer, ours).items():
            yield place, path, _sized(entry, model.of_layer(layer)) if _has_widths(model) else entry


def _has_widths(model: TransformerConfig) -> bool:
    """Returns True if layers have sizes of their own."""
    return bool(model.full or model.shared_keys)


def _sized(entry: Entry, model: TransformerConfig) -> Entry:
    """Returns the entry of a layer whose sizes are those of this model, and not the whole one's."""
    sizes, rule = sizes_of(model), entry.rule
    return entry._replace(rule=lambda _, shape: rule(sizes, shape))


def _further_layer(family: str, model: TransformerConfig, layout: int) -> Part:
    """Returns the entries of the layer of model.multi_token's blocks."""
    names, layouts = NAMES[family], _layouts(family, model)
    has_experts = model.further_parts.mlp == "experts" and layouts
    return {**_layer(family, model), **(layouts[layout] if has_experts else names.mlp)}


def _layouts(family: str, model: TransformerConfig) -> Layouts:
    """Returns the layouts of experts; a model that chooses without a bias has no tensor for it."""
    layouts = NAMES[family].experts
    if model.experts is None or model.experts.bias_rate is not None:
        return layouts
    return tuple({**part, LOAD_BIAS: NO_BIAS} for part in layouts)


def _layer(family: str, model: TransformerConfig) -> dict[str, Entry]:
    """Returns what all layers have."""
    has_plain_queries = model.latent is not None and not model.latent.query_rank
    return {**NAMES[family].layer, **(PLAIN_QUERIES if has_plain_queries else {})}


def _further(family: str, model: TransformerConfig, layout: int) -> Table:
    """Returns the entries of model.multi_token, whose blocks are like the last layer."""
    further = NAMES[family].further
    count = model.experts.count if model.experts else 0
    of_layer = further.in_layer(_further_layer(family, model, layout))
    entries = {}
    for depth, number in enumerate(further.numbers(model)):
        ours = f"{FURTHER}{depth}."
        for path, entry in of_layer.items():
            of_block = entry.of_experts(count).of_all(range(number, number + 1))
            entries[ours + path.replace(OURS, "block.layer.")] = of_block
        for path, entry in further.own.items():
            names = tuple(name.replace(LAYER, str(number)) for name in entry.names)
            entries[ours + path] = Entry(entry.rule, names)
    return entries


def in_mxfp4(table: Table) -> Table:
    """Returns the table of files in which the matrices of experts are MXFP4."""
    packed = dict(table)
    for ours in OF_EXPERTS:
        rule, (name,), first, step = table[OURS + ours]
        names = (name + mxfp4.BLOCKS, name + mxfp4.SCALES)
        packed[OURS + ours] = Entry(mxfp4.of_blocks(rule), names, first, step)
    return packed
