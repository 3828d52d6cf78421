"""Multiplies queries by a factor that grows with the position of their token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import TemperatureConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.kinds import kind_of


@dataclass(frozen=True)
class Temperature:
    """The temperature of a layer's queries, as [model.temperature] describes it."""

    settings: TemperatureConfig
    has_it: tuple[bool, ...]  # each layer

    def __call__(self, q_btknd: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns queries times the factor of their position, in the layer `ctx.layer`."""
        if not any(self.has_it):
            return q_btknd
        weight: jax.Array | float = self.settings.weight
        if not all(self.has_it):
            of_kinds = [weight * has for has in dict.fromkeys(self.has_it)]
            weight = jnp.array(of_kinds, jnp.float32)[kind_of(self.has_it, ctx.layer)]
        blocks_bt = (ctx.positions_bt + self.settings.offset) // self.settings.length
        factor_bt = 1 + weight * jnp.log1p(blocks_bt.astype(jnp.float32))
        wide = q_btknd.astype(jnp.float32) * factor_bt[:, :, None, None, None]
        return wide.astype(q_btknd.dtype)


def make_temperature(settings: TemperatureConfig, config: TransformerConfig) -> Temperature:
    """Returns the temperature of a model's queries."""
    everywhere = settings.layers == "all"
    has_it = tuple(everywhere or kind.rope_theta is None for kind in config.layer_kinds)
    return Temperature(settings, has_it)
