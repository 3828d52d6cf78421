"""Which part of the work a program of a Hopper kernel takes."""

import jax

COMPUTING = 2  # warpgroups of a program; one more copies
CACHE = 24 * 2**20  # bytes of keys and values that programs which run at the same time shall share; the L2 has 50 MB


def grid_of(heads: int, tiles: int, size: int) -> dict[str, int]:
    """The programs: `size` bytes of keys and values are read by each of `heads` heads, all batches counted.

    Sections of so many heads as the cache holds run one after the other; in each the tiles from first to last.
    """
    together = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * size <= CACHE))
    return {"head": together, "tile": tiles, "section": heads // together}


def program(heads: int):
    """(batch, head, tile) of this program of `grid_of`; `heads` of one batch."""
    number = jax.lax.axis_index("section") * jax.lax.axis_size("head") + jax.lax.axis_index("head")
    return jax.lax.div(number, heads), jax.lax.rem(number, heads), jax.lax.axis_index("tile")


def limits_of(ref, batch, at):
    """The reference to the four of `bounds` for tile `at`. Read where they are used: kept in registers they spill."""
    return ref.at[batch if ref.shape[0] > 1 else 0, at]
