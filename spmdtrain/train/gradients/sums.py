"""Sums of losses and counts of tokens, and the means that become of them.

A sum is a float32 scalar; in the training of a mixture it is a vector [1 + sources], all tokens
first and then those of each source.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.axes import BATCH_AXES, Rules
from spmdtrain.parallel.reduce import psum_tree
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses, of_the_step


def join_losses(of_head: Losses, of_layers: Losses) -> Losses:
    """The losses of the head and the side losses of the layers. ConfigError for a name of both."""
    for name in sorted(of_layers):
        if name in of_head or name in of_the_step():
            what = f"a side loss of a block is called {name!r}, as another figure of a step is"
            raise ConfigError(what, fix="another name")
    return of_head | of_layers


def objective(losses: Losses) -> Any:
    """The scalar that training minimises: the sum of all losses."""
    return sum(total_of(loss) for loss in losses.values())


def count_tokens(setup: Setup, batch: Batch, *, training: bool) -> dict[str, jax.Array]:
    """{"tokens": the unmasked ones of a batch}, float32; of a mixture in training a vector as the
    losses are.
    """
    mask = batch["mask"].astype(jnp.float32)
    if not training or "source" not in batch:
        return {"tokens": mask.sum()}
    of_sequence = mask.sum(-1)[..., None]  # first: time may be split, and is to be summed once
    each = (of_sequence * by_source(setup, batch)).sum(tuple(range(mask.ndim - 1)))
    return {"tokens": jnp.concatenate([of_sequence.sum()[None], each])}


def means(setup: Setup, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Each loss over the number of tokens, and both numbers of tokens, scalars by name.

    `sums`: scalars, or of a mixture vectors [1 + sources] that become NAME and NAME/SOURCE. A
    source without tokens has a loss of 0: its number of tokens says that there is none.
    """
    sources = ["", *(f"/{source.name}" for source in setup.config.data.mix)]
    tokens = sums["tokens"]
    found = {}
    for name, total in sums.items():
        over = tokens if total.ndim else total_of(tokens)
        mean = total if name == "tokens" else total / jnp.maximum(over, 1)
        if mean.ndim:
            found |= {name + source: mean[at] for at, source in enumerate(sources)}
        else:
            found[name] = mean
    return found


def total_of(sums: jax.Array) -> jax.Array:
    """The sum over all sources, which stands before those of each."""
    return sums[0] if sums.ndim else sums


def by_source(setup: Setup, batch: Batch) -> jax.Array:
    """Marks the source of each sequence: float32 [..., sources], 1 at its source, else 0."""
    sources = jnp.arange(len(setup.config.data.mix))
    return (batch["source"][..., None] == sources).astype(jnp.float32)


def sum_over_shards(sums: dict[str, jax.Array], rules: Rules) -> dict[str, jax.Array]:
    """Losses and numbers of tokens, summed over the shards of the batch."""
    axes = [axis for axis in BATCH_AXES if rules.sizes[axis] > 1]
    return psum_tree(sums, axes)
