"""Joins the setup of a run with that of its teacher."""

from dataclasses import replace

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.train.distillation.run_teacher import NAME, Teacher, check_loss
from spmdtrain.train.items.items import NO_ITEMS
from spmdtrain.train.setup import Setup
from spmdtrain.train.setup_alone import Ruled, setup_alone


def join_teacher(setup: Setup) -> Setup:
    """Returns the setup of a run with the teacher that it names, whose weights are in its state;
    the same if it names none.

    Raises ConfigError if the two cannot read the same batch.
    """
    if setup.config.distill.teacher is None:
        return setup
    from spmdtrain.config.published.teacher import teacher_settings

    settings = teacher_settings(setup.config)
    assert settings is not None, "a teacher is named"
    check_loss(setup)
    of_teacher = setup_alone(settings, setup.mesh, None, _all_frozen, None, None, NO_ITEMS)
    if of_teacher.zigzag != setup.zigzag:
        raise ConfigError(
            f"{setup.config.distill.source} reads tokens in another order over mesh.context",
            asked=setup.context_line,
            found=of_teacher.context_line,
            fix="--set model.context_attention=gather",
        )
    items = setup.state.items | {NAME: of_teacher.state.params}
    state = replace(setup.state, items=items)
    return replace(
        setup, state=state, own={**setup.own, NAME: Teacher(of_teacher, setup.config.distill)}
    )


def _all_frozen(config: RunConfig, model: AbstractModel) -> Ruled:
    del config
    return model.freezing_all_but(()), {}
