"""Brings a config to devices: derives the setup of a run from its settings, once."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from spmdtrain.config.schema import RunConfig, check_config
from spmdtrain.models.abstract import build_model
from spmdtrain.models.choose import MakeModel, choose_model
from spmdtrain.parallel.axes import make_rules
from spmdtrain.parallel.matmuls.tensor_matmul import check_matmuls
from spmdtrain.parallel.mesh import build_mesh
from spmdtrain.pipeline.choose import pipeline_schedule
from spmdtrain.train import token_loss
from spmdtrain.train.batch import choose_way, cut_batch
from spmdtrain.train.exchange import (
    copies_of_weights,
    feedback_codecs,
    gathered_weights,
    reductions_of,
)
from spmdtrain.train.resting import lay_to_rest
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.chosen_rules import check_frozen, with_update_rules
from spmdtrain.train.updates.learning_rates import LearningRate, make_learning_rate


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
    config, make = choose_model(config, make)
    rules = make_rules(config.rules, mesh.shape)
    check_matmuls(config, rules, mesh)
    batch_shape = cut_batch(config.train, rules)
    model = build_model(config, make, mesh.shape["pipeline"], config.pipeline.chunks)
    table = pipeline_schedule(
        config, model.stage_layout, batch_shape.accumulation, model.frozen_rounds(config)
    )
    model, update_rules = with_update_rules(config, model, optimizer)
    check_frozen(config, model)
    token_loss.check_multi_token(config, model)
    loss = token_loss.choose(config, loss)
    specs, padding, state = lay_to_rest(config, mesh, model, update_rules, config.train.zero)
    gathered = gathered_weights(model, specs)
    by_layers = gathered if table is None else {}
    return Setup(
        config=config,
        make=make,
        mesh=mesh,
        rules=rules,
        model=model,
        batch_shape=batch_shape,
        way=choose_way(config, rules, model.keeps_order),
        update_rules=update_rules,
        learning_rate=make_learning_rate(config, learning_rate),
        loss=loss,
        pipeline=table,
        specs=specs,
        padding=padding,
        reductions=reductions_of(config, model, mesh, specs, by_layers),
        codecs=feedback_codecs(config, model, mesh.shape),
        copies=copies_of_weights(model, rules, specs, by_layers),
        gathered=gathered,
        state=state,
    )
