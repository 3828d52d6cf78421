"""Lays out the rows that arrive at a device, padded to tiles of one expert each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped import tile_groups, tiles_for
from spmdtrain.parallel.experts.sending import NOWHERE, Bucket, count_below, inverse, look_up


class Arrived(NamedTuple):
    """The places of a round's rows on the device of their experts."""

    message_p: jax.Array  # the message of each padded row, among d m; NOWHERE for padding
    gate_p: jax.Array  # float32; 0 for padding
    expert_of_tile_t: jax.Array  # -1 for a tile that nobody uses
    places_mk: jax.Array  # the padded places of a message's rows; NOWHERE for none
    place_q: jax.Array  # the padded place of each row


def lay_out(
    message_dc: jax.Array,
    expert_dc: jax.Array,
    gate_dc: jax.Array,
    bucket: Bucket,
    own: int,
    *,
    message_rows: int,
    tile: int,
) -> Arrived:
    """Sorts the rows of a round by expert, and pads each expert's to whole tiles.

    message_dc: the place of a row's message in the bucket of its sender; m for none.
    expert_dc: the number of its expert among the `own`; any other for none.
    message_rows: the largest number of rows of a message.
    tile: rows of a tile.
    """
    devices, rows = message_dc.shape[0], message_dc.size
    is_row_dc = message_dc < bucket.messages
    message_dc = jnp.where(
        is_row_dc, bucket.messages * jnp.arange(devices)[:, None] + message_dc, NOWHERE
    )
    expert_q = jnp.where(is_row_dc, expert_dc, own).reshape(-1)
    row_s = jnp.argsort(expert_q, stable=True).astype(jnp.int32)
    ends_l = count_below(expert_q, jnp.arange(own) + 1)
    tiles = tile_groups(jnp.diff(ends_l, prepend=0), rows, tile)

    padded = tiles_for(rows, own, tile) * tile
    row_q = jnp.arange(rows, dtype=jnp.int32)
    place_s = jnp.where(tiles.place_r < padded, tiles.place_r, NOWHERE + row_q)
    place_q = inverse(row_s, rows, place_s)
    row_p = inverse(place_s, padded, row_s)

    # The rows of a message are contiguous: this is the number of each within its message.
    column_c = jnp.arange(message_dc.shape[1], dtype=jnp.int32)
    is_first_dc = jnp.diff(message_dc, axis=1, prepend=-1) != 0
    first_dc = jax.lax.cummax(jnp.where(is_first_dc, column_c, 0), axis=1)
    at_dc = jnp.where(is_row_dc, message_dc * message_rows + column_c - first_dc, NOWHERE)
    at_q = jnp.where(is_row_dc.reshape(-1), at_dc.reshape(-1), NOWHERE + row_q)
    messages = devices * bucket.messages
    return Arrived(
        message_p=look_up(message_dc.reshape(-1), row_p, NOWHERE),
        gate_p=look_up(gate_dc.reshape(-1), row_p, 0.0),
        expert_of_tile_t=tiles.expert_of_tile_t,
        places_mk=inverse(at_q, messages * message_rows, place_q).reshape(messages, message_rows),
        place_q=place_q,
    )
