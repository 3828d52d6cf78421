"""Pads rows for `grouped_matmul`, so that each tile of them belongs to one expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """The places of rows sorted by expert, and the expert of each tile."""

    place_r: jax.Array  # int32 [rows]: the padded row of each sorted row
    expert_of_tile_t: jax.Array  # int32 [tiles]: -1 for a tile that nobody uses


def tiles_for(rows: int, experts: int, tile: int) -> int:
    """Returns the number of tiles of `tile` rows that always suffices: an expert wastes less than
    one.
    """
    return rows // tile + min(rows, experts)


def tile_groups(sizes_x: jax.Array, rows: int, tile: int) -> Tiles:
    """Pads each group of sorted rows to whole tiles; shapes depend on no size.

    `padded = jnp.zeros((tiles * tile, k)).at[place_r].set(x_rk, mode="drop")` moves the rows, and
    `y_padded[place_r]` gets their results back. Padding rows stay zeros.

    Args:
      sizes_x: integers [experts]: how many of the rows are each expert's, expert 0 first.
      rows: the number of rows. Those beyond the sum of the sizes belong to no expert: their
        place is past the end.
      tile: rows of a tile.
    """
    experts = sizes_x.shape[0]
    tiles = tiles_for(rows, experts, tile)
    sizes_x = sizes_x.astype(jnp.int32)
    ends_x = jnp.cumsum(sizes_x)
    tiles_x = (sizes_x + tile - 1) // tile
    tile_ends_x = jnp.cumsum(tiles_x)
    # How far the rows of an expert move: from where they begin to where its first tile does.
    shift_x = (tile_ends_x - tiles_x) * tile - (ends_x - sizes_x)
    row_r = jnp.arange(rows, dtype=jnp.int32)
    # Unrolled, the search is one kernel on a GPU; a loop of one for each step otherwise.
    expert_r = jnp.searchsorted(ends_x, row_r, side="right", method="scan_unrolled")
    place_r = jnp.where(expert_r < experts, row_r + shift_x[expert_r], tiles * tile)
    expert_t = jnp.searchsorted(
        tile_ends_x, jnp.arange(tiles), side="right", method="scan_unrolled"
    )
    expert_of_tile_t = jnp.where(expert_t < experts, expert_t, -1)
    return Tiles(place_r.astype(jnp.int32), expert_of_tile_t.astype(jnp.int32))


def order_by_expert(expert_of_tile_t: jax.Array, experts: int) -> jax.Array:
    """Returns the numbers of the tiles, int32 [tiles], expert 0's first and unused ones last."""
    unused_last_t = jnp.where(expert_of_tile_t < 0, experts, expert_of_tile_t)
    return jnp.argsort(unused_last_t, stable=True).astype(jnp.int32)
