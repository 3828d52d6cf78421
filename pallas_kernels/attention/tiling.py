"""Tile sizes of the Triton kernels, by head dim and bytes per element.

Chosen to fit in registers and in the shared memory of sm_80 (163 KiB): aot.py proves that. Not tuned: no GPU was there.
"""

from dataclasses import dataclass


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


def tile(table: dict[int, dict[int, Tile]], head_dim: int, itemsize: int, t: int, s: int) -> Tile:
    """For padded head dims up to 256; no wider than the padded lengths t and s."""
    best = next(found for limit, found in table[itemsize].items() if head_dim <= limit)
    return Tile(min(best.q, t), min(best.k, s), best.warps, best.stages)
