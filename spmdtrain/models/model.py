"""Defines the interface of a model to the rest of the framework: three parts."""

from typing import Protocol

import jax

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import Stack


class LanguageModel(Protocol):
    """A Flax NNX module with the parts that training, evaluation and sampling run.

    Shapes: tokens [b, t], activations [b, t, e], the head's table [v, e].

    A model that learns to restore tokens, instead of predicting the next token, has a fourth part:
    `corrupt(tokens_bt, key_b) -> (corrupted_bt, chosen_bt)`. It is trained and evaluated only on
    the chosen tokens (bool), from all of the corrupted ones (ids). `key_b` has a random key per
    sequence, which depends only on (seed, global sample index). It reads no weights.

    A model that is trained with `model.multi_token` has `predict_further`, as `Transformer` does.
    """

    blocks: Stack

    def embed(self, tokens_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns the activations [b, t, e] of the tokens."""
        ...

    def head(self, x_bte: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states [b, t, e], and the table [v, e]: their products are the logits.

        `model.logit_scale`, `model.mup_base` and `model.logit_cap` shape them afterwards.
        """
        ...
