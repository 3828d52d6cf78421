"""Lays out the grid: which part of the work a program of a Hopper kernel takes."""

from typing import Any, NamedTuple

import jax

COMPUTING = 2  # computing warpgroups of a program; one more copies
ROWS = 64  # of a wgmma: the queries, or keys, of one computing warpgroup

# Bytes that concurrent programs should read: about half of Hopper's L2 of 50 MB.
CACHE = 24 * 2**20


def program_grid(heads: int, tiles: int, size: int) -> dict[str, int]:
    """Returns the sizes of the grid, fastest first, for `tiles` tiles of `heads` batch x heads.

    Every program of a head reads the same `size` bytes. Sections of as many heads as CACHE holds
    run one after another, and in each section the tiles from first to last: the bytes that the
    programs of a head share then stay in the L2.
    """
    together = 1
    for count in range(1, heads + 1):
        if heads % count == 0 and count * size <= CACHE:
            together = count
    return {"head": together, "tile": tiles, "section": heads // together}


class Program(NamedTuple):
    batch: Any
    head: Any  # of this batch
    tile: Any


def this_program(heads: int) -> Program:
    """Maps the running program's grid indices to its work; `heads` heads per batch entry."""
    section = jax.lax.axis_index("section") * jax.lax.axis_size("head")
    number = section + jax.lax.axis_index("head")
    batch = jax.lax.div(number, heads)
    head = jax.lax.rem(number, heads)
    return Program(batch, head, jax.lax.axis_index("tile"))


def bounds_of(bounds_ref, program: Program):
    """Returns the reference to the four `tile_bounds` of a program's tile.

    It is read where a bound is used: four values held in registers would spill.
    """
    batch = program.batch if bounds_ref.shape[0] > 1 else 0
    return bounds_ref.at[batch, program.tile]
