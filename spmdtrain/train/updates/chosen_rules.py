"""The rule of every parameter: those of an optimizer, and of what no optimizer learns."""

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.train.updates import optimizers, router_load
from spmdtrain.train.updates.shipped_optimizers import shipped_update_rules


def with_update_rules(
    config: RunConfig, model: AbstractModel, optimizer: optimizers.Optimizer | None
) -> tuple[AbstractModel, optimizers.UpdateRules]:
    """Returns (model, update rules by path); a parameter without a rule is frozen in the model.

    The rules are those of the caller's `optimizer`, or of the settings if it is None. The biases of
    routers have their own.
    """
    trained = {path: each for path, each in model.parameters.items() if each.is_trained}
    of_loads = router_load.update_rules(config.model.experts, trained)
    trained = {path: each for path, each in trained.items() if path not in of_loads}
    if optimizer is None:
        update_rules = shipped_update_rules(config.optimizer, trained, config.model.width_factor)
    elif config.model.mup_base is not None:
        raise ConfigError(
            f"optimizer= and model.mup_base={config.model.mup_base} both choose rates",
            fix="an optimizer that the settings name, or model.mup_base=none",
        )
    else:
        update_rules = optimizers.choose_update_rules(optimizer, trained, model.layout)
    update_rules = {**update_rules, **of_loads}
    return model.freezing_all_but(update_rules), update_rules
