"""Measures the machine at hand and writes it down as a hardware file: matmuls, copies, collectives.

What is measured are rates that software reaches; the file holds the figures that, times the shares of stack.py, give
these rates again. What cannot be measured here (the network, where there is one host) is taken over from below and
said so in `sources`.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import StorageError
from spmdtrain.planner.hardware import DEVICES, KINDS
from spmdtrain.planner.stack import LINK, MEMORY

LONGEST = 0.3  # seconds that one timed call may take before sizes stop growing
REPEATS = 5


def calibrate() -> dict[str, Any]:
    """Figures of `Hardware` and, under "sources", where each comes from."""
    device = jax.devices()[0]
    known = DEVICES.get(KINDS.get(device.device_kind, ""))
    found: dict[str, Any] = {
        "bfloat16": matmul_rate("bfloat16"),
        "float32": matmul_rate("float32"),
        "matmul": 1.0,
        "memory_bandwidth": copy_rate() / MEMORY,
        "memory": _memory(device),
        "cores": known.cores if known else getattr(device, "core_count", None) or 1,
        "per_host": jax.local_device_count(),
        "power": known.power if known else 1.0,
    }
    sources = dict.fromkeys(found, f"measured on {device.device_kind}")
    sources |= dict.fromkeys(("cores", "power"), f"data of {known.name}" if known else "not known")
    bandwidth, latency = ring()
    inside = jax.process_count() == 1
    name, other = ("link", "network") if inside else ("network", "link")
    if bandwidth:
        found |= {f"{name}_bandwidth": bandwidth / LINK, f"{name}_latency": max(latency, 1e-9)}
        sources |= dict.fromkeys((f"{name}_bandwidth", f"{name}_latency"), f"measured, {jax.device_count()} devices")
    for missing in ("link", "network") if not bandwidth else (other,):
        key = f"{missing}_bandwidth"
        found[key] = getattr(known, key) if known else found.get(f"{name}_bandwidth", found["memory_bandwidth"])
        sources[key] = f"not measured: that of {known.name}" if known else "not measured: as the fastest path here"
    return found | {"sources": sources}


def matmul_rate(dtype: str) -> float:
    """FLOP/s of the best square matmul on one device."""
    best, size = 0.0, 256
    run = jax.jit(lambda a, b: a @ b)
    while size <= 16384:
        x = jnp.ones((size, size), dtype)
        seconds = timed(lambda x=x: run(x, x))
        best = max(best, 2 * size**3 / seconds)
        if seconds > LONGEST / 8:
            break
        size *= 2
    return best


def copy_rate() -> float:
    """Bytes/s read and written by one device."""
    size = 2**20
    run = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: fresh pages would be timed too
    while True:
        held = [jnp.zeros(size, jnp.float32)]

        def once(held=held):
            held.append(run(held.pop()))
            return held[0]

        seconds = timed(once)
        if seconds > LONGEST / 4 or size >= 2**26:  # the largest array counts: smaller ones sit in caches
            return 2 * 4 * size / seconds
        size *= 4


def ring() -> tuple[float, float]:
    """(bytes/s, seconds per hop) of an all-reduce over all devices; (0, 0) for one device."""
    count = jax.device_count()
    if count == 1:
        return 0.0, 0.0
    mesh = Mesh(np.array(jax.devices()), ("all",))
    over = jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P(None), out_specs=P(None))
    whole = NamedSharding(mesh, P(None))

    def seconds(size: int) -> float:
        x = jax.jit(lambda: jnp.zeros(size, jnp.float32), out_shardings=whole)()
        return timed(lambda: jax.jit(over)(x))

    small, large = 2**8, 2**22
    short, long = seconds(small), seconds(large)
    moved = 2 * (count - 1) / count * 4 * (large - small)
    return moved / max(long - short, 1e-9), short / (2 * (count - 1))


def timed(run: Callable[[], jax.Array]) -> float:
    """Median seconds of a call, compiled before."""
    jax.block_until_ready(run())
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        took.append(time.perf_counter() - start)
    return sorted(took)[REPEATS // 2]


def _memory(device: jax.Device) -> float:
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, NotImplementedError):
        limit = None
    if limit:
        return float(limit)
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    total = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal")), 2**33)
    return total / jax.local_device_count()


def write(found: dict[str, Any], path: Path) -> None:
    """As the TOML file that `--hardware` reads."""
    lines = ["# Written by `spmdtrain calibrate`: this machine, for --hardware."]
    lines += [f"{key} = {_number(value)}" for key, value in found.items() if key != "sources"]
    lines += ["", "[sources]", *(f'{key} = "{text}"' for key, text in found["sources"].items())]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}" if math.isfinite(value) else "0.0"
