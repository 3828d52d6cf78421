"""Computes sums of losses, counts of tokens and pairs, and the means made from them.

A sum is a float32 scalar; in the training of a mixture it is a vector [1 + sources], first all
tokens and then those of each source.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.axes import BATCH_AXES, Rules
from spmdtrain.parallel.reduce import psum_tree
from spmdtrain.train.batch import Batch
from spmdtrain.train.part import MEASURED, Parts
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses, of_the_step

COUNTS = ("tokens", "pairs")
APART = "further "  # before the names of side losses that a pipeline's head gives with its own


def join_losses(setup: Setup, of_head: Losses, of_layers: Losses) -> Losses:
    """Returns the losses of the head and the side losses of the layers.

    Raises ConfigError if both have the same name.
    """
    others = of_head.keys() | of_the_step(setup.items)
    for name in sorted(of_layers):
        if name in others:
            what = f"a side loss of a block is called {name!r}, like another figure of a step"
            raise ConfigError(what, fix="another name")
    return of_head | of_layers


def objective(losses: Losses, parts: Parts) -> Any:
    """Returns the scalar that training minimises: the sum of all losses."""
    return sum(total_of(losses[name]) for name in losses if _is_minimised(name, parts))


def only_minimised(losses: Losses, parts: Parts) -> Losses:
    """Returns the same losses; those that training does not minimise have no gradient."""
    return {
        name: loss if _is_minimised(name, parts) else jax.lax.stop_gradient(loss)
        for name, loss in losses.items()
    }


def minimised(sums: Iterable[str], parts: Parts) -> list[str]:
    """Returns which of these sums, by name, are losses that training minimises."""
    return [name for name in sums if name not in COUNTS and _is_minimised(name, parts)]


def _is_minimised(name: str, parts: Parts) -> bool:
    is_shown = any(name in part.shown for part in parts)
    return not is_shown and not name.startswith(MEASURED)


def with_side_names(side_losses: Losses) -> Losses:
    """Returns the side losses renamed, so that none clashes with a loss of the head."""
    return {APART + name: loss for name, loss in side_losses.items()}


def split_side_losses(of_head: Losses) -> tuple[Losses, Losses]:
    """Returns (losses of the head alone, side losses that `with_side_names` named)."""
    alone = {name: loss for name, loss in of_head.items() if not name.startswith(APART)}
    further = {name.removeprefix(APART): of_head[name] for name in of_head.keys() - alone.keys()}
    return alone, further


def take_measured(sums: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (sums of losses and counts, what hooks have measured for items, by their names)."""
    names = {name for name in sums if name.startswith(MEASURED)}
    of_items = {name.removeprefix(MEASURED): sums[name] for name in sorted(names)}
    return {name: x for name, x in sums.items() if name not in names}, of_items


def count_tokens(setup: Setup, batch: Batch, *, training: bool) -> dict[str, jax.Array]:
    """Returns {"tokens": the number of unmasked ones in a batch}, float32.

    In the training of a mixture it is a vector, like the losses. If pairs of answers are learned,
    "pairs" is their number.
    """
    mask = batch["mask"].astype(jnp.float32)
    if setup.config.train.learns_pairs:
        from spmdtrain.train.gradients.pair_loss import count_pairs

        length = mask.shape[-1]
        segments = batch["segment_ids"].reshape(-1, length)
        return {"tokens": mask.sum(), "pairs": count_pairs(mask.reshape(-1, length), segments)}
    if not training or "source" not in batch:
        return {"tokens": mask.sum()}
    of_sequence = mask.sum(-1)[..., None]  # first: time may be split, and must be summed once
    of_source = (of_sequence * by_source(setup, batch)).sum(tuple(range(mask.ndim - 1)))
    return {"tokens": jnp.concatenate([of_sequence.sum()[None], of_source])}


def number_of(sums: Mapping[str, Any]) -> Any:
    """Returns the divisor of means: the number of pairs if pairs are learned, else of tokens."""
    return sums.get("pairs", sums["tokens"])


def means(
    setup: Setup, sums: dict[str, jax.Array], gradients: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns each loss over the number of tokens or pairs, and these numbers, scalars by name.

    `sums`: scalars, or for a mixture vectors [1 + sources] that become NAME and NAME/SOURCE. A
    source without tokens has a loss of 0: its number of tokens shows that it has none. The load of
    experts is no sum: the gradients hold it (router_load.py).
    """
    sources = ["", *(f"/{source.name}" for source in setup.config.data.mix)]
    number = number_of(sums)
    figures = {}
    for name, total in sums.items():
        over = number if total.ndim else total_of(number)
        mean = total if name in COUNTS else total / jnp.maximum(over, 1)
        if mean.ndim:
            figures |= {name + source: mean[at] for at, source in enumerate(sources)}
        else:
            figures[name] = mean
    if not setup.model.has_load_biases:
        return figures
    from spmdtrain.train.updates.router_load import figures as figures_of_loads

    return figures | figures_of_loads(setup.config.model, setup.model, gradients)


def total_of(sums: jax.Array) -> jax.Array:
    """Returns the entry for all sources, which comes first."""
    return sums[0] if sums.ndim else sums


def by_source(setup: Setup, batch: Batch) -> jax.Array:
    """Returns the source of each sequence, one-hot: float32 [..., sources]."""
    sources = jnp.arange(len(setup.config.data.mix))
    return (batch["source"][..., None] == sources).astype(jnp.float32)


def sum_over_shards(sums: dict[str, jax.Array], rules: Rules) -> dict[str, jax.Array]:
    """Returns losses and numbers of tokens, summed over the shards of the batch."""
    axes = [axis for axis in BATCH_AXES if rules.sizes[axis] > 1]
    return psum_tree(sums, axes)
