"""Builds the setup of a single model, without the parts of its run."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel, build_model
from spmdtrain.models.choose import MakeModel, choose_model
from spmdtrain.parallel.axes import IndivisibleError, make_rules
from spmdtrain.parallel.tensor_matmul import check_matmuls
from spmdtrain.train import token_loss
from spmdtrain.train.batch import choose_context_method, cut_batch
from spmdtrain.train.exchange import (
    copies_of_weights,
    gathered_weights,
    reductions_of,
)
from spmdtrain.train.fitting_sizes import propose_size
from spmdtrain.train.items.items import Items
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import place_at_rest
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.chosen_rules import check_frozen
from spmdtrain.train.updates.learning_rates import LearningRate, make_learning_rate

if TYPE_CHECKING:
    from spmdtrain.pipeline.schedule import Table

Ruled = tuple[AbstractModel, optimizers.UpdateRules]


def setup_alone(
    config: RunConfig,
    mesh: Mesh,
    make: MakeModel | str | None,
    with_rules: Callable[[RunConfig, AbstractModel], Ruled],
    learning_rate: LearningRate | None,
    loss: TokenLoss | None,
    items: Items,
) -> Setup:
    """Returns the setup of the config's model, before parts join it.

    `with_rules` returns the model with what has no rule frozen, and the rules of the others.
    """
    config, make = choose_model(config, make)
    rules = make_rules(config.rules, mesh.shape)
    check_matmuls(config, rules, mesh)
    batch_shape = cut_batch(config, rules)
    model = build_model(config, make, mesh.shape["pipeline"], config.pipeline.chunks)
    table = find_pipeline(config, model, batch_shape.accumulation)
    model, update_rules = with_rules(config, model)
    check_frozen(config, model, items)
    model.check_blocks(rules, batch_shape.sequences, config.train.sequence_length)
    loss = token_loss.choose(config, loss, items)
    try:
        specs, padding, state = place_at_rest(
            config, mesh, model, update_rules, config.train.zero, items
        )
    except IndivisibleError as error:
        propose_size(error, config, make, mesh.shape["pipeline"])
        raise
    gathered = gathered_weights(model, specs)
    by_layers = gathered if table is None else {}
    return Setup(
        config=config,
        make=make,
        mesh=mesh,
        rules=rules,
        model=model,
        batch_shape=batch_shape,
        context_method=choose_context_method(config, rules, model.order_reason),
        update_rules=update_rules,
        learning_rate=make_learning_rate(config, learning_rate),
        loss=loss,
        pipeline=table,
        specs=specs,
        padding=padding,
        reductions=reductions_of(config, model, mesh, specs, by_layers),
        copies=copies_of_weights(model, rules, specs, by_layers),
        gathered=gathered,
        items=items,
        state=state,
    )


def find_pipeline(config: RunConfig, model: AbstractModel, accumulation: int) -> "Table | None":
    """Returns the schedule of a pipeline, or None if the model has one stage.

    `accumulation`: its microbatches.
    """
    if model.stage_layout.stages == 1:
        return None
    from spmdtrain.pipeline.find_table import pipeline_schedule

    return pipeline_schedule(config, model.stage_layout, accumulation, model.frozen_rounds(config))
