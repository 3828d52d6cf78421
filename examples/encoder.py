"""An encoder, trained as BERT is (Devlin et al. 2018, arXiv:1810.04805).

Every token sees all others, and the model restores the tokens that were masked.

    spmdtrain train examples/encoder.toml --simulate-devices 8
    spmdtrain eval runs/encoder --make examples/encoder.py:Encoder

The config names this file, and its table [model.extra] holds the settings of `Settings`. Letters:
b batch, t time.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config import RunConfig
from spmdtrain.models.layers import Attention
from spmdtrain.models.transformer import Transformer


@dataclass(frozen=True)
class Settings:
    """The settings of [model.extra]; the defaults are BERT's."""

    chosen: float = 0.15  # share of all tokens: those to restore; the loss is over them
    masked: float = 0.8  # share of the chosen that become the mask token
    random: float = 0.1  # share of the chosen that become a random token; the rest are unchanged


class Encoder(Transformer):
    """The shipped transformer without the causal mask.

    The last id of its vocabulary is the mask token: `model.vocab` is one more than the corpus has.
    """

    def __init__(self, config: RunConfig, rngs: nnx.Rngs, extra: Settings):
        super().__init__(config, rngs, attention=partial(Attention, causal=False))
        self.mask_token = config.vocab - 1
        self.extra = extra

    def corrupt(self, tokens_bt: jax.Array, key_b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (tokens as the model sees them, which to restore), from one key per sequence."""

        def of_sequence(tokens_t, key):
            keys = jax.random.split(key, 3)
            is_chosen_t = jax.random.uniform(keys[0], tokens_t.shape) < self.extra.chosen
            fate_t = jax.random.uniform(keys[1], tokens_t.shape)
            random_t = jax.random.randint(keys[2], tokens_t.shape, 0, self.mask_token)
            is_random_t = fate_t < self.extra.masked + self.extra.random
            seen_t = jnp.where(is_random_t, random_t, tokens_t)
            seen_t = jnp.where(fate_t < self.extra.masked, self.mask_token, seen_t)
            return jnp.where(is_chosen_t, seen_t, tokens_t), is_chosen_t

        return jax.vmap(of_sequence)(tokens_bt, key_b)
