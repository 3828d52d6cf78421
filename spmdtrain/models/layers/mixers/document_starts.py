"""Finds the starts of documents, at which a mixer forgets what is in front."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.parallel.context.sequence_pieces import Pieces


class DocumentStarts(NamedTuple):
    """The documents of the pieces of a device, rows of its batch."""

    starts_bt: jax.Array  # bool: the first token of a document
    # For each token in front of a piece: it is in the document that the piece continues.
    is_same_bw: jax.Array


def find_starts(
    pieces: Pieces, segment_ids_bt: jax.Array | None, x_btn: jax.Array, reach: int
) -> DocumentStarts:
    """Returns the starts of documents in x [b, t, ...], the pieces of this device.

    `segment_ids_bt` are those of whole sequences; None: one document. `reach`: the number of tokens
    in front. A row that begins in the middle of a document starts from an empty state like any
    other, as attention starts without earlier keys.
    """
    rows, tokens = x_btn.shape[:2]
    if segment_ids_bt is None:
        return DocumentStarts(jnp.zeros((rows, tokens), bool), jnp.ones((rows, reach), bool))
    ids = pieces.in_order(segment_ids_bt)
    starts = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    number = jnp.cumsum(starts, 1, dtype=jnp.int32)
    first = tokens * np.arange(pieces.count)[:, None]
    in_front = jnp.pad(number, ((0, 0), (reach, 0)))[:, first + np.arange(reach)]
    is_same = in_front == number[:, first]  # [b, pieces, reach]
    by_piece = starts.reshape(starts.shape[0], pieces.count, tokens)
    return DocumentStarts(*(pieces.own(jnp.moveaxis(x, 1, 0)) for x in (by_piece, is_same)))
