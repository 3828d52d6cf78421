"""Chooses the tile sizes of the kernels.

They fit in registers and shared memory, which aot.py proves by compiling; for Triton that is the
shared memory of sm_80, 163 KiB. They are not tuned, for lack of a GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pallas_kernels.gpus import generation

# Triton


@dataclass(frozen=True)
class Tile:
    """The tile of scores of a program, and how Triton compiles it."""

    q: int  # queries
    k: int  # keys
    warps: int  # of 32 threads
    stages: int  # depth of the software pipeline


Table = Mapping[int, Mapping[int, Tile]]  # by bytes per element, then by the largest head dim

FORWARD: Table = {
    2: {
        64: Tile(128, 64, 4, 3),
        128: Tile(128, 64, 8, 2),
        256: Tile(64, 64, 8, 2),
    },
    4: {
        64: Tile(64, 32, 4, 2),
        128: Tile(64, 32, 8, 2),
        256: Tile(32, 32, 8, 1),
    },
}
DQ: Table = {
    2: {
        64: Tile(64, 64, 4, 2),
        128: Tile(64, 64, 8, 2),
        256: Tile(64, 32, 8, 1),
    },
    4: {
        64: Tile(32, 32, 4, 2),
        128: Tile(32, 32, 8, 1),
        256: Tile(16, 32, 8, 1),
    },
}
DKV: Table = {
    2: {
        64: Tile(64, 64, 4, 2),
        128: Tile(64, 64, 8, 2),
        256: Tile(32, 64, 8, 1),
    },
    4: {
        64: Tile(32, 32, 4, 2),
        128: Tile(32, 32, 8, 1),
        256: Tile(32, 16, 8, 1),
    },
}
TABLES = {"attention_forward": FORWARD, "attention_dq": DQ, "attention_dkv": DKV}
# The tiles that differ, for 16-bit elements. python -m pallas_kernels.assembled shows why: an
# Ampere warp holds all operands of its matmuls in registers, and a thread would write up to 16 KB
# of them to memory; 8 warps of Hopper, whose matmuls are of 64 rows, would make 64 queries'
# products twice; Blackwell keeps accumulators in its tensor memory, 512 columns: dk and dv of 64
# keys by 256 would leave none for their scores; and it reads them back each turn, which larger
# tiles do less often.
OWN: Mapping[str, Mapping[str, Mapping[int, Tile]]] = {
    "ampere": {
        "attention_forward": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 4, 2)},
        "attention_dq": {64: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
        "attention_dkv": {64: Tile(32, 64, 4, 2)},
    },
    "hopper": {
        "attention_forward": {256: Tile(128, 64, 8, 2)},
        "attention_dq": {128: Tile(64, 64, 4, 2), 256: Tile(128, 32, 8, 1)},
        "attention_dkv": {128: Tile(64, 64, 4, 2)},
    },
    "blackwell": {
        "attention_forward": {128: Tile(128, 128, 8, 2), 256: Tile(128, 64, 8, 2)},
        "attention_dq": {64: Tile(128, 64, 4, 2), 128: Tile(128, 64, 8, 2)},
        "attention_dkv": {
            64: Tile(64, 128, 4, 2),
            128: Tile(64, 128, 8, 2),
            256: Tile(64, 32, 8, 1),
        },
    },
}


def triton_table(kernel: str, device_kind: str) -> Table:
    """Returns the table of a kernel on this GPU, by jax's name for it."""
    table = TABLES[kernel]
    own = OWN.get(generation(device_kind), {}).get(kernel, {})
    return {**table, 2: {**table[2], **own}}


# Other tilings than the tables', which are tried where kernels are measured: "triton/narrow".
VARIANTS: Mapping[str, Callable[[Tile], Tile]] = {
    "narrow": lambda tile: replace(tile, q=max(tile.q // 2, 16)),
    "deep": lambda tile: replace(tile, stages=tile.stages + 1),
    "light": lambda tile: replace(tile, warps=max(tile.warps // 2, 1)),
}


def varied(table: Table, variant: str) -> Table:
    """Returns the table with each tile changed by this variant; "" is the table itself."""
    if not variant:
        return table
    change = VARIANTS[variant]
    return {
        itemsize: {limit: change(each) for limit, each in tiles.items()}
        for itemsize, tiles in table.items()
    }


def tile(table: Table, head_dim: int, itemsize: int, t: int, s: int) -> Tile:
    """Returns the tile for a padded head dim up to 256, within the padded lengths t and s."""
    by_head_dim = table[itemsize]
    limit = min(limit for limit in by_head_dim if head_dim <= limit)
    best = by_head_dim[limit]
    return Tile(min(best.q, t), min(best.k, s), best.warps, best.stages)


# Hopper, 16-bit elements, by the larger of both head dims, padded to a multiple of 64.


@dataclass(frozen=True)
class WarpgroupTile:
    """The forward kernel's tile, one for each of its two computing warpgroups."""

    q: int  # queries of a warpgroup: the 64 rows of a wgmma
    k: int  # keys
    stages: int  # tiles of keys, and of values, in shared memory


HOPPER_FORWARD = {
    64: WarpgroupTile(64, 128, 4),
    128: WarpgroupTile(64, 128, 2),
    192: WarpgroupTile(64, 64, 3),
    256: WarpgroupTile(64, 64, 2),
}


@dataclass(frozen=True)
class GradientTile:
    """A backward kernel's tile, that of a program.

    q is 128 in the dq kernel; k is 128 or 64 in the dk and dv kernel.

    `stages`: tiles in shared memory, of keys and of values in the dq kernel, of queries and of
    gradients of out in the other. `registers`: of a copying and of a computing thread; one copying
    and two computing warpgroups share 504. `overlap`: whether the second matmul of scores runs
    while the first is used even with a softcap or masks.
    """

    q: int
    k: int
    stages: tuple[int, int]
    registers: tuple[int, int] = (24, 240)
    overlap: bool = True


HOPPER_DQ = {
    64: GradientTile(128, 128, (2, 2)),
    128: GradientTile(128, 64, (2, 2)),
    192: GradientTile(128, 64, (2, 2), overlap=False),
    256: GradientTile(128, 64, (2, 1), overlap=False),
}
HOPPER_DKV = {
    64: GradientTile(64, 128, (3, 3)),
    128: GradientTile(64, 128, (2, 2), overlap=False),
    192: GradientTile(64, 64, (2, 2), registers=(40, 232)),
    256: GradientTile(64, 64, (2, 2), registers=(40, 232), overlap=False),
}
GradientTable = Mapping[int, GradientTile]


class HopperTables(NamedTuple):
    """The tiles of the three kernels, by the larger head dim."""

    forward: Mapping[int, WarpgroupTile]
    dq: GradientTable
    dkv: GradientTable


# Half the keys in a tile, where it has 128: "mosaic/narrow".
HOPPER_VARIANTS: Mapping[str, HopperTables] = {
    "narrow": HopperTables(
        HOPPER_FORWARD | {64: WarpgroupTile(64, 64, 8), 128: WarpgroupTile(64, 64, 4)},
        HOPPER_DQ | {64: GradientTile(128, 64, (4, 4))},
        HOPPER_DKV
        | {
            64: GradientTile(64, 64, (3, 3), registers=(40, 232)),
            128: GradientTile(64, 64, (2, 2), registers=(40, 232)),
        },
    )
}


def hopper_tables(variant: str) -> HopperTables:
    """Returns the tables of a variant; "" is none."""
    return HOPPER_VARIANTS.get(variant) or HopperTables(HOPPER_FORWARD, HOPPER_DQ, HOPPER_DKV)
