"""Derives the setup of a run from its config and devices, once."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from spmdtrain.config.schema import RunConfig, check_config
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.models.choose import MakeModel
from spmdtrain.parallel.mesh import build_mesh
from spmdtrain.train.all_parts import items_of, parts_of
from spmdtrain.train.setup import Setup
from spmdtrain.train.setup_alone import Ruled, setup_alone
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.chosen_rules import with_update_rules
from spmdtrain.train.updates.learning_rates import LearningRate


def shard(
    config: RunConfig,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    optimizer: optimizers.Optimizer | None = None,
    learning_rate: LearningRate | None = None,
    loss: TokenLoss | None = None,
) -> Setup:
    """Returns the setup of `config` on these devices (default: all). Allocates nothing.

    `config.model.vocab` must be set (`config.with_vocab`). Raises ConfigError if the settings, the
    model and the devices do not fit.

    Args:
      make: `make(config, rngs)` builds the model; or the name of a class, like `model.make`, which
        is the default. With an argument `extra` it takes the settings of [model.extra].
      optimizer: an optax transformation for all parameters, or `optimizer(path, parameter)`, which
        returns one, a `Rule` (with its own rate), or None to freeze the parameter. It must leave
        the learning rate out, as `optax.scale_by_adam()` does. Default: `config.optimizer`.
      learning_rate: `learning_rate(step)`, the rate of the 0-based step, in jax.numpy; replaces
        `optimizer.learning_rate`, `schedule`, `warmup` and `final_learning_rate`.
      loss: `loss(logits, targets)`, float32 [b, t, v] and int32 [b, t], returns the losses [b, t]
        of the tokens, or several by name, `loss` among them; training minimises the mean of their
        sum. It is called with a part of the tokens at once. Evaluation has only `loss`. Pass
        values that are only reported through `jax.lax.stop_gradient`. Default: cross-entropy.

    Where one of the three is None, it is the one that `config.own` names.
    """
    check_config(config)
    mesh = build_mesh(config.mesh, devices, config.origin)
    return shard_on(config, mesh, make, optimizer=optimizer, learning_rate=learning_rate, loss=loss)


def shard_on(
    config: RunConfig,
    mesh: Mesh,
    make: MakeModel | str | None = None,
    *,
    optimizer: optimizers.Optimizer | None = None,
    learning_rate: LearningRate | None = None,
    loss: TokenLoss | None = None,
) -> Setup:
    """Returns the setup, as `shard` does, on a given mesh, which may be abstract."""

    def with_rules(config: RunConfig, model: AbstractModel) -> Ruled:
        return with_update_rules(config, model, optimizer)

    parts = parts_of(config)
    setup = setup_alone(config, mesh, make, with_rules, learning_rate, loss, items_of(parts))
    for part in parts:
        setup = part.join(setup) if part.join else setup
    return setup
