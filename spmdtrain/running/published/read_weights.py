"""Reads the weights of a published model straight into the shards of a run."""

from collections.abc import Sequence

import jax

from spmdtrain.config.errors import CheckpointError, UserError
from spmdtrain.config.published.read_config import Published
from spmdtrain.interop.published_weights import Weights
from spmdtrain.processes.processes import any_process
from spmdtrain.train.external_arrays.from_layers import layer_shapes, params_from_layers
from spmdtrain.train.setup import Setup


def read_weights(
    setup: Setup, published: Published, ignored: Sequence[str] = ()
) -> tuple[dict[str, jax.Array], Weights]:
    """Returns the weights of a published model in the shards of `setup`, and where they came from.

    All processes call it, and each reads its own parts. Raises CheckpointError in all of them if
    the files do not hold this model, or numbers that are not finite.
    """
    wrong = None
    weights = None
    try:
        weights = Weights(published, setup.config.model, layer_shapes(setup), ignored)
    except UserError as error:
        wrong = error
    if any_process(wrong is not None):
        raise wrong or CheckpointError(
            f"another process cannot read {published.folder}",
            fix="a folder that every host sees as the same one",
        )
    assert weights is not None
    params = params_from_layers(setup, weights.read)
    if any_process(weights.not_finite is not None):
        raise CheckpointError(
            f"{published.folder} holds a NaN or an infinity",
            found=weights.not_finite or "in what another process has read",
            fix="a checkpoint from before, or downloading it again",
        )
    return params, weights
