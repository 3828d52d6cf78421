"""Estimates the seconds of single kernels on one device: matmuls, passes over memory, fused
attention.

All sizes are per device.
"""

from functools import lru_cache

from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.software import (
    INNER_OVERHEAD,
    LAUNCH_SECONDS,
    MATMUL_TILES,
    MEMORY_SHARE,
    WAVE_ROUNDING,
    Software,
)
from spmdtrain.planner.cost.workload import bytes_of


@lru_cache(maxsize=100_000)
def matmul_seconds(
    rows: int,
    columns: int,
    inner: int,
    *,
    hardware: Hardware,
    software: Software,
    dtype: str,
    count: int = 1,
) -> float:
    """Returns the seconds of [rows, inner] x [inner, columns], `count` times in one kernel.

    The kernel uses the best of a few tile sizes. Tiles are distributed to the cores in waves, and a
    partly filled last wave takes longer than its share (wave quantisation).
    """
    rate = hardware.peak(dtype) * hardware.matmul * software.matmul_share
    best = float("inf")
    for height, width, rate_share in MATMUL_TILES:
        # Edge tiles are padded, and computed in full.
        tiles = count * -(-rows // height) * -(-columns // width)
        waves = tiles / hardware.cores
        whole_waves = -(-tiles // hardware.cores)
        if waves > 1:
            waves = waves + WAVE_ROUNDING * (whole_waves - waves)
        else:
            waves = 1.0  # the first wave takes just as long if some cores have no tile
        flops = 2 * waves * hardware.cores * height * width * (inner + INNER_OVERHEAD)
        best = min(best, flops / (rate * rate_share))
    elements = rows * inner + inner * columns + rows * columns
    moved = count * bytes_of(dtype) * elements
    # A matmul with a short dim is bound by reading its operands and writing its result.
    return max(best, moved / (MEMORY_SHARE * hardware.memory_bandwidth)) + LAUNCH_SECONDS


def memory_seconds(moved: float, hardware: Hardware) -> float:
    """Returns the seconds of reading and writing `moved` bytes in total."""
    return moved / (MEMORY_SHARE * hardware.memory_bandwidth)


def fused_attention_seconds(
    flops: float,
    keys: int,
    head_dim: int,
    *,
    hardware: Hardware,
    software: Software,
    dtype: str,
) -> float:
    """Returns the seconds of attention in one kernel, over `keys` keys.

    Short sequences leave tiles half empty: published benchmarks of FlashAttention 2 on A100 and 3
    on H100 all follow keys / (keys + 500). A head_dim of 64 reaches 0.9 of the rate of 128.
    """
    head_dim_share = 0.9 if head_dim < 128 else 1.0
    share = software.attention_share * head_dim_share * keys / (keys + 500)
    return flops / (hardware.peak(dtype) * share) + LAUNCH_SECONDS
