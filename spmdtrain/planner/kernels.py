"""Seconds of single kernels and collectives on one device. Sizes are those one device sees."""

from functools import lru_cache

from spmdtrain.planner.hardware import Hardware
from spmdtrain.planner.stack import HOP, LAUNCH, LINK, MEMORY, RAMP, TILES, WAVE, Stack


@lru_cache(maxsize=100_000)
def matmul(rows: int, columns: int, inner: int, device: Hardware, stack: Stack, dtype: str, count: int = 1) -> float:
    """[rows, inner] x [inner, columns], `count` of them at once: the best tile, dealt out to the cores in waves."""
    size = 4 if dtype == "float32" else 2
    rate = device.peak(dtype) * device.matmul * stack.matmul
    best = float("inf")
    for height, width, share in TILES:
        tiles = count * -(-rows // height) * -(-columns // width)
        waves = tiles / device.cores
        whole = -(-tiles // device.cores)
        waves = waves + WAVE * (whole - waves) if waves > 1 else 1.0
        flops = 2 * waves * device.cores * height * width * (inner + RAMP)
        best = min(best, flops / (rate * share))
    moved = count * size * (rows * inner + inner * columns + rows * columns)
    return max(best, moved / (MEMORY * device.memory_bandwidth)) + LAUNCH


def memory_pass(moved: float, device: Hardware) -> float:
    """Bytes read and written."""
    return moved / (MEMORY * device.memory_bandwidth)


def fused_attention(flops: float, keys: int, head_dim: int, device: Hardware, stack: Stack, dtype: str) -> float:
    """Short sequences leave tiles half empty: fa2_a100 and fa3_h100 all follow s / (s + 500); head_dim 64 has 0.9."""
    share = stack.flash * (0.9 if head_dim < 128 else 1.0) * keys / (keys + 500)
    return flops / (device.peak(dtype) * share) + LAUNCH


def group_bandwidth(size: int, stride: int, device: Hardware, rings: bool = True) -> float:
    """Bytes/s that each member of a ring gets. A ring that leaves its host uses one network card per member there."""
    on_a_host = max(1, min(size, device.per_host // stride))
    if on_a_host == size:
        return LINK * device.link_bandwidth
    cards = on_a_host if rings else 1
    return LINK * min(device.link_bandwidth, cards * device.network_bandwidth)


def latency(size: int, stride: int, device: Hardware) -> float:
    """Of all hops of a ring, one after the other: of the members on a host one sends to the next host."""
    on_a_host = max(1, min(size, device.per_host // stride))
    across = 0 if on_a_host == size else min(size - 1, size / on_a_host)
    return (size - 1 - across) * device.link_latency + across * device.network_latency


def gather(moved: float, size: int, stride: int, device: Hardware, rings: bool = True, pieces: int = 1) -> float:
    """All-gather or reduce-scatter of `moved` bytes (the whole, on each member), `pieces` of them one by one."""
    if size == 1:
        return 0.0
    bandwidth = group_bandwidth(size, stride, device, rings)
    return (size - 1) / size * moved / bandwidth + pieces * latency(size, stride, device)


def all_reduce(moved: float, size: int, stride: int, device: Hardware, rings: bool = True) -> float:
    return 2 * gather(moved, size, stride, device, rings)


def hop(moved: float, stride: int, device: Hardware) -> float:
    """To the next stage, over the link that the farther of two neighbours in a ring of stages needs."""
    inside = stride < device.per_host
    bandwidth = HOP * device.link_bandwidth if inside else device.network_bandwidth
    return moved / (LINK * bandwidth) + (device.link_latency if inside else device.network_latency)
