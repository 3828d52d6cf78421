"""The inputs and the result of finding gradients: the same with a pipeline and without one."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from spmdtrain.train.batch import Batch


class StepInputs(NamedTuple):
    """The values on which the gradients of a step depend, besides the weights.

    `step`: its 0-based number, an int32 scalar, the seed of its dropout. `cotangent`: a float32
    scalar from which the backward pass starts; None: 1. `items`: those of the state, by name. An
    item that is not among them is done without: gradients are then sent in full, and each matmul
    in 8 bits scales its arrays by themselves.
    """

    step: jax.Array | None
    batch: Batch
    cotangent: jax.Array | None = None
    items: Mapping[str, Any] = {}


class FoundGradients(NamedTuple):
    """The gradients of the mean objective, by path, and the sums of losses and counts.

    `made`: what the step has made for items of the state while it computed gradients, by their
    names.
    """

    gradients: dict[str, jax.Array]
    sums: dict[str, jax.Array]
    made: Mapping[str, Any] = {}


# Finds the gradients of weights at rest.
FindGradients = Callable[[dict[str, jax.Array], StepInputs], FoundGradients]
