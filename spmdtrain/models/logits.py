"""Computes logits of the head's hidden states, for uses that need all logits of a few tokens.

Letters: b batch, t time, e embed, v rows of the table.
"""

from typing import TypedDict

import jax
import jax.numpy as jnp

from pallas_kernels.loss import shape_logits
from spmdtrain.config.schema import TransformerConfig


class LogitShape(TypedDict):
    """The options that turn products into logits, in the words of `pallas_kernels.loss`."""

    scale: float
    softcap: float | None


def logit_shape(config: TransformerConfig) -> LogitShape:
    """Returns the scale and the cap of the model's logits."""
    return {"scale": config.logit_factor, "softcap": config.logit_cap}


def logits_of(
    hidden_bte: jax.Array, table_ve: jax.Array, scale: float = 1.0, softcap: float | None = None
) -> jax.Array:
    """Returns the logits of every token, float32 [b, t, v]: products, scaled, then capped."""
    products = jnp.einsum("bte,ve->btv", hidden_bte, table_ve, preferred_element_type=jnp.float32)
    return shape_logits(products, scale, softcap)
