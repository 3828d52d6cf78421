"""Finds the starts of documents, at which a mixer forgets what is in front."""

import jax
import jax.numpy as jnp


def starts_of(segment_ids_bt: jax.Array | None) -> jax.Array | None:
    """Returns True for the first token of each document but a row's first, [b, t]; None for None.

    A row that begins in the middle of a document starts from an empty state like any other, as
    attention starts without earlier keys.
    """
    if segment_ids_bt is None:
        return None
    differs = segment_ids_bt[:, 1:] != segment_ids_bt[:, :-1]
    return jnp.pad(differs, ((0, 0), (1, 0)))
