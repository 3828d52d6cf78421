"""Makes batches for a model that restores corrupted tokens, as BERT does (arXiv:1810.04805).

This works on global arrays, before the region of the gradients: every path through the model then
sees the same batch, regardless of mesh and accumulation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.context import sample_corruption
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.part import Part
from spmdtrain.train.setup import Setup


def make_corrupt(setup: Setup) -> Callable[[Batch], Batch] | None:
    """Returns `corrupt(batch) -> batch`, which calls the model's own `corrupt`; None if it has
    none.

    Targets are the tokens at their own places; those count that are chosen and counted before. A
    token that does not count (padding, a question in a conversation) is not changed. Raises
    ConfigError if the model returns anything but tokens and a choice of them.
    """
    own = setup.model.corrupt
    if own is None:
        return None
    seed = setup.config.train.seed

    def one(tokens_bt: jax.Array, sample_b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return own(tokens_bt, sample_corruption(seed, sample_b))

    _check(one, setup)

    def corrupt(batch: Batch) -> Batch:
        tokens = batch["tokens"]
        corrupted, chosen = jax.vmap(one)(tokens, batch["sample"])  # microbatch by microbatch
        counts = batch["mask"] > 0
        return batch | {
            "tokens": jnp.where(counts, corrupted, tokens).astype(tokens.dtype),
            "targets": tokens,
            "mask": jnp.where(chosen, batch["mask"], 0),
        }

    return corrupt


def _check(one: Callable, setup: Setup) -> None:
    _, sequences = setup.batch_shape
    shape = (sequences, setup.config.train.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    outputs = jax.eval_shape(one, tokens, jax.ShapeDtypeStruct((sequences,), jnp.uint32))
    kinds = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(outputs)]
    if kinds != [f"int32{list(shape)}", f"bool{list(shape)}"]:
        raise ConfigError(
            "corrupt(tokens_bt, key_b) of the model does not return what it should",
            asked=f"(tokens int32{list(shape)}, chosen bool{list(shape)})",
            found=", ".join(kinds),
        )


def _make_inputs(setup: Setup) -> Callable[[StepInputs], StepInputs] | None:
    corrupt = make_corrupt(setup)
    if corrupt is None:
        return None
    return lambda inputs: inputs._replace(batch=corrupt(inputs.batch))


CORRUPT = Part("corrupt", make_inputs=_make_inputs)
