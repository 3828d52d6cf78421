"""Refuses optax transformations that a step cannot use, recognised by their state."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.abstract import Parameter

# (its state, its name, why it does not fit, what to use)
UNFIT = (
    (
        contrib.SAMState,
        "sam",
        "leaves the weights moved uphill after every other step, where they may be saved",
        "the optimizer inside it",
    ),
    (
        contrib.ScheduleFreeState,
        "schedule_free",
        "keeps the weights to evaluate and to save in its state, where no evaluation looks",
        "--set optimizer.name=schedule_free_adamw",
    ),
    (
        contrib.DifferentiallyPrivateAggregateState,
        "differentially_private_aggregate",
        "needs the gradient of each example, and a step has their sum",
        "optimizer= without it; train.clip limits the norm of the sum",
    ),
)


def refuse_unfit(
    transformation: optax.GradientTransformation, parameters: Mapping[str, Parameter]
) -> None:
    """Raises ConfigError for a transformation that would not work correctly here."""
    tensors = {path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for path, x in parameters.items()}
    try:
        state = jax.eval_shape(transformation.init, tensors)
    except Exception:  # noqa: BLE001 - the caller's code; the trial says what it raises
        return
    kinds = tuple(kind for kind, *_ in UNFIT)
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)):
        for kind, name, why, fix in UNFIT:
            if isinstance(node, kind):
                raise ConfigError(f"optimizer= holds optax.contrib.{name}: it {why}", fix=fix)
