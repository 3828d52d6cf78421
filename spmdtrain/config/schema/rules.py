"""[rules]: what is split over which mesh axes."""

from spmdtrain.config.settings import Settings, Strings


class RulesConfig(Settings):
    """The overrides of the sharding rules: logical axis -> mesh axes.

    A new name adds a rule, for models that have other logical axes.
    """

    parameters: dict[str, Strings] = {}
    activations: dict[str, Strings] = {}
