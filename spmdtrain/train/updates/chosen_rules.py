"""Chooses the update rule of every parameter, including those that no optimizer learns."""

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.own_parts import own_part
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.train.items.items import Items
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.shipped_optimizers import shipped_update_rules


def with_update_rules(
    config: RunConfig, model: AbstractModel, optimizer: optimizers.Optimizer | None
) -> tuple[AbstractModel, optimizers.UpdateRules]:
    """Returns (model, update rules by path); a parameter without a rule is frozen in the model.

    The rules are those of the caller's `optimizer`; if it is None, those of `own.optimizer` or of
    the settings. The biases of routers have their own.
    """
    parameters = model.parameters.items()
    trained = {path: parameter for path, parameter in parameters if parameter.is_trained}
    of_loads = {}
    if model.has_load_biases:
        from spmdtrain.train.updates.router_load import update_rules as rules_of_loads

        of_loads = rules_of_loads(config.model.experts, trained)
    trained = {path: trained[path] for path in trained if path not in of_loads}
    if optimizer is None:
        optimizer = own_part(config, "optimizer")
    if optimizer is None:
        update_rules = shipped_update_rules(config.optimizer, trained, config.model.width_factor)
    elif config.optimizer.memory == "host":
        raise ConfigError(
            "optimizer.memory='host': an own optimizer= may need more of a layer than a device's "
            "part",
            fix="an optimizer that the settings name, or optimizer.memory=device",
        )
    elif config.model.mup_base is not None:
        raise ConfigError(
            f"optimizer= and model.mup_base={config.model.mup_base} both choose rates",
            fix="an optimizer that the settings name, or model.mup_base=none",
        )
    else:
        update_rules = optimizers.choose_update_rules(optimizer, trained, model.stage_layout)
    update_rules = {**update_rules, **of_loads}
    if config.always_frozen:
        below = model.below_the_stack(config)
        update_rules = {path: rule for path, rule in update_rules.items() if path not in below}
    return model.freezing_all_but(update_rules), update_rules


def check_frozen(config: RunConfig, model: AbstractModel, items: Items) -> None:
    """Refuses a dtype of frozen weights if there are none, neither in the model nor as an item."""
    dtype = config.precision.frozen
    is_chosen = config.precision.is_given("frozen")
    is_frozen = any(parameter.is_frozen for parameter in model.parameters.values())
    if is_chosen and not is_frozen and all(item.is_saved for item in items.table):
        raise ConfigError(
            f"precision.frozen={dtype!r}: no weight of this run is frozen",
            fix="--set finetune.kind=lora, or --set precision.frozen=none",
        )
