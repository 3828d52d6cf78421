"""Joins the setup of a run with that of its teacher, or with what one has said before."""

from dataclasses import replace

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.teacher import teacher_settings
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.saved_logits.manifest import saved_for
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.train.distillation.teacher_item import ITEM as TEACHER
from spmdtrain.train.setup import Setup, Teacher
from spmdtrain.train.setup_alone import Ruled, setup_alone


def join_teacher(setup: Setup) -> Setup:
    """Returns the setup of a run with the teacher that it names, whose weights are in its state.

    Raises ConfigError if both cannot read the same batch.
    """
    settings = teacher_settings(setup.config)
    assert settings is not None, "the run names a teacher"
    _check_tokens(setup)
    of_teacher = setup_alone(settings, setup.mesh, None, _all_frozen, None, None)
    if of_teacher.context_method.zigzag != setup.context_method.zigzag:
        raise ConfigError(
            f"{setup.config.distill.source} reads tokens in another order over mesh.context",
            asked=setup.context_method.line,
            found=of_teacher.context_method.line,
            fix="--set model.context_attention=gather",
        )
    items = setup.state.items | {TEACHER.name: of_teacher.state.params}
    state = replace(setup.state, items=items)
    return replace(setup, state=state, teacher=Teacher(of_teacher))


def _all_frozen(config: RunConfig, model: AbstractModel) -> Ruled:
    del config
    return model.freezing_all_but(()), {}


def join_logits(setup: Setup) -> Setup:
    """Returns the setup of a run with the saved logits that it names; the same if it names none.

    Raises UserError if they do not fit the run.
    """
    saved = saved_for(setup.config)
    if saved is None:
        return setup
    _check_tokens(setup)
    return replace(setup, logits=saved)


def _check_tokens(setup: Setup) -> None:
    """Refuses a model that does not predict the next token."""
    if setup.model.corrupt is not None:
        source = setup.config.distill.source
        name, _, _ = source.partition("=")
        raise ConfigError(
            f"{source} predicts the next token, and this model restores tokens",
            fix=f"--set {name}=none",
        )
