"""[rules]: the mesh axes over which each logical axis is split."""

from spmdtrain.config.settings import Settings, Strings


class RulesConfig(Settings):
    """The overrides of the sharding rules: logical axis -> mesh axes.

    A new name adds a rule, for models that have other logical axes.
    """

    parameters: dict[str, Strings] = {}
    activations: dict[str, Strings] = {}
