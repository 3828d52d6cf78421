"""The interface of a model to the rest of the framework: three parts."""

from typing import Protocol

import jax

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import Stack


class LanguageModel(Protocol):
    """A Flax NNX module with the parts that training, evaluation and sampling run.

    Shapes: tokens [b, t], activations [b, t, e], the head's table [v, e].

    A model that learns to restore tokens, in place of the one behind each, has a fourth part:
    `corrupt(tokens_bt, key_b) -> (corrupted_bt, chosen_bt)`. It is trained and evaluated on the
    chosen tokens alone (bool), from all of the corrupted ones (ids). `key_b` has a random key per
    sequence, of (seed, global sample index) alone. It reads no weights.
    """

    blocks: Stack

    def embed(self, tokens_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Activations [b, t, e] of the tokens."""
        ...

    def head(self, x_bte: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Hidden states [b, t, e], and the table [v, e] whose products with them are the logits.

        `model.logit_scale` and `model.logit_cap` shape them afterwards.
        """
        ...
