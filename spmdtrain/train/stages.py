"""Makes the setup of each stage of `train.stages`: the batch changes, the state does not.

The weights, their shardings and the optimizer do not depend on the batch. So a step compiled for
one stage takes the state that the step of another has returned.
"""

from dataclasses import replace

from spmdtrain.config.schema import RunConfig
from spmdtrain.config.stage_timetable import TimedStage
from spmdtrain.train.batch import choose_context_method, cut_batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.setup_alone import find_pipeline


def stages_of(setup: Setup) -> tuple[TimedStage, ...]:
    """Returns the stages of a run; one without `train.stages` has a single one."""
    return setup.config.train.timetable


def setup_of(setup: Setup, stage: TimedStage) -> Setup:
    """Returns the setup for the steps of one stage; for the last stage, `setup` itself.

    Raises ConfigError if the mesh does not divide the batch of the stage.
    """
    if stage.last is None:
        return setup
    config = setup.config.in_stage(stage)
    number = stages_of(setup).index(stage)
    batch_shape = cut_batch(config, setup.rules, f"train.stages[{number}].global_batch")
    table = find_pipeline(config, setup.model, batch_shape.accumulation)

    def in_stage(config: RunConfig) -> RunConfig:
        return config.in_stage(stage)

    return replace(
        setup,
        config=config,
        batch_shape=batch_shape,
        context_method=choose_context_method(config, setup.rules, setup.model.order_reason),
        pipeline=table,
        own={name: own.of_batches(in_stage) for name, own in setup.own.items()},
    )


def setup_at(setup: Setup, step: int) -> Setup:
    """Returns the setup of the 1-based `step`."""
    return setup_of(setup, setup.config.train.stage_of(step))
