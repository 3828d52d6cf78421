"""Tile sizes of the Triton kernels, by head dim and bytes per element.

Chosen to fit in registers and in the shared memory of sm_80 (163 KiB): aot.py proves that. Not tuned: no GPU was there.
"""

from dataclasses import dataclass

from pallas_kernels.gpus import generation


@dataclass(frozen=True)
class Tile:
    q: int
    k: int
    warps: int
    stages: int


FORWARD = {2: {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 64, 8, 2)},
           4: {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 1)}}  # fmt: skip
DQ = {2: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
      4: {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)}}  # fmt: skip
DKV = {2: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 64, 8, 1)},
       4: {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 1), 256: Tile(32, 16, 8, 1)}}  # fmt: skip
# Blackwell keeps sums in its tensor memory, 512 columns: dk and dv of 64 keys by 256 would leave none for their scores.
DKV_BLACKWELL = {**DKV, 2: DKV[2] | {256: Tile(64, 32, 8, 1)}}


def dkv(kind: str) -> dict[int, dict[int, Tile]]:
    """The table for a GPU of that kind, as jax names it."""
    return DKV_BLACKWELL if generation(kind) == "blackwell" else DKV


def tile(table: dict[int, dict[int, Tile]], head_dim: int, itemsize: int, t: int, s: int) -> Tile:
    """For padded head dims up to 256; no wider than the padded lengths t and s."""
    best = next(found for limit, found in table[itemsize].items() if head_dim <= limit)
    return Tile(min(best.q, t), min(best.k, s), best.warps, best.stages)


@dataclass(frozen=True)
class WarpgroupTile:
    """Of the forward kernel for Hopper, whose programs have two computing warpgroups."""

    q: int  # of one warpgroup
    k: int
    stages: int  # tiles of the other kind in shared memory


# 16-bit elements, by the larger of the two head dims, a multiple of 64; 64 queries are one matmul's rows
HOPPER_FORWARD = {64: WarpgroupTile(64, 128, 4), 128: WarpgroupTile(64, 128, 2), 192: WarpgroupTile(64, 64, 3),
                  256: WarpgroupTile(64, 64, 2)}  # fmt: skip


@dataclass(frozen=True)
class GradientTile:
    """Of the backward kernels for Hopper, those of a program: q is 128 in the dq kernel, k 128 or 64 in the other."""

    q: int
    k: int
    stages: tuple[
        int, int
    ]  # tiles in shared memory: of keys and of values; of queries and of gradients of out
    registers: tuple[int, int] = (
        24,
        240,
    )  # of a thread that copies, that computes: 1 + 2 warpgroups share 504
    overlap: bool = (
        True  # the second product of scores while the first is used, with softcap or places too
    )


HOPPER_DQ = {64: GradientTile(128, 128, (2, 2)), 128: GradientTile(128, 64, (2, 2)),
             192: GradientTile(128, 64, (2, 2), overlap=False),
             256: GradientTile(128, 64, (2, 1), overlap=False)}  # fmt: skip
HOPPER_DKV = {64: GradientTile(64, 128, (3, 3)), 128: GradientTile(64, 128, (2, 2), overlap=False),
              192: GradientTile(64, 64, (2, 2), (40, 232)),
              256: GradientTile(64, 64, (2, 2), (40, 232), overlap=False)}  # fmt: skip
