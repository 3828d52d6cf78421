"""Lists the features that take part in a step, and imports those that a run has.

A new one is a function and a row here. Items are updated, inputs changed and losses chosen in the
order of the rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from spmdtrain.config.schema import RunConfig
from spmdtrain.train.items.item import Item, Value
from spmdtrain.train.items.items import Items
from spmdtrain.train.part import Part, Parts


@dataclass(frozen=True)
class Feature:
    """A part that is imported where the settings ask for it. `items`: the names of its items, and
    `example`: settings with which a tiny run has them, for tests of all items.
    """

    begins: Callable[[RunConfig], bool]
    part: Callable[[], Part]
    items: tuple[str, ...] = ()
    example: tuple[str, ...] = ()


def _ema() -> Part:
    from spmdtrain.train.items.ema import EMA

    return EMA


def _spikes() -> Part:
    from spmdtrain.train.items.spikes import SPIKES

    return SPIKES


def _loss_scale() -> Part:
    from spmdtrain.train.items.loss_scale import LOSS_SCALE

    return LOSS_SCALE


def _islands() -> Part:
    from spmdtrain.train.islands.outer_step import OUTER_STEP

    return OUTER_STEP


def _sparsity() -> Part:
    from spmdtrain.train.sparsity.masks import SPARSITY

    return SPARSITY


def _compression() -> Part:
    from spmdtrain.train.compression.feedback_part import COMPRESSION

    return COMPRESSION


def _magnitudes() -> Part:
    from spmdtrain.train.scaling.scales import MAGNITUDES

    return MAGNITUDES


def _teacher() -> Part:
    from spmdtrain.train.distillation.taught import TEACHER

    return TEACHER


def _saved_logits() -> Part:
    from spmdtrain.train.distillation.saved import SAVED_LOGITS

    return SAVED_LOGITS


def _pairs() -> Part:
    from spmdtrain.train.gradients.pair_head import PAIRS

    return PAIRS


def _multi_token() -> Part:
    from spmdtrain.train.gradients.further_losses import MULTI_TOKEN

    return MULTI_TOKEN


def _routers() -> Part:
    from spmdtrain.train.updates.router_load import ROUTERS

    return ROUTERS


def _corrupt() -> Part:
    from spmdtrain.train.corrupt import CORRUPT

    return CORRUPT


FEATURES: tuple[Feature, ...] = (
    Feature(
        lambda config: config.optimizer.ema is not None, _ema, ("ema",), ("optimizer.ema=0.9",)
    ),
    Feature(
        lambda config: config.guard.window is not None,
        _spikes,
        ("recent",),
        ("guard.sigmas=6", "guard.window=8"),
    ),
    Feature(
        lambda config: config.precision.compute == "float16",
        _loss_scale,
        ("loss_scale",),
        ("precision.compute=float16",),
    ),
    Feature(
        lambda config: config.islands.are_several,
        _islands,
        ("outer", "outer_momentum", "unmet"),
        ("islands.count=2", "islands.index=0", "islands.directory=there"),
    ),
    Feature(
        lambda config: config.sparsity.pattern != "none",
        _sparsity,
        ("masks",),
        ("sparsity.pattern=2:4",),
    ),
    Feature(
        lambda config: config.compression.has_feedback,
        _compression,
        ("errors", "factors"),
        ("compression.codec=lowrank",),
    ),
    Feature(
        lambda config: config.precision.scaling == "delayed",
        _magnitudes,
        ("magnitudes",),
        ("precision.matmul=float8", "precision.scaling=delayed"),
    ),
    Feature(lambda config: config.distill.teacher is not None, _teacher, ("teacher",)),
    Feature(lambda config: config.distill.logits is not None, _saved_logits),
    Feature(lambda config: config.train.learns_pairs, _pairs),
    Feature(lambda config: config.model.further_depth > 0, _multi_token),
    Feature(lambda config: config.model.experts is not None, _routers),
    Feature(lambda _: True, _corrupt),
)


def item_names() -> list[str]:
    """Returns the names of all items that a state may have."""
    return [name for feature in FEATURES for name in feature.items]


def parts_of(config: RunConfig) -> Parts:
    """Returns the parts of the features that a run has."""
    return tuple(feature.part() for feature in FEATURES if feature.begins(config))


def items_of(parts: Parts) -> Items:
    """Returns the items that the state of a run with these parts may have."""
    return Items(tuple(item for part in parts for item in part.items))


def with_items(values: Mapping[str, Value]) -> Iterator[tuple[Item, Value]]:
    """Yields each item of a state with its value, given the values by name."""
    return items_named(values).of(values)


def items_named(names: Collection[str]) -> Items:
    """Returns the items with these names, and all other items of their parts."""
    return items_of(
        tuple(feature.part() for feature in FEATURES if not set(feature.items).isdisjoint(names))
    )
