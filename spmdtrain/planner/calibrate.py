"""Measures this machine and writes a hardware file: `spmdtrain calibrate`.

Matmuls, copies and collectives give the rates that software reaches. The file holds figures that,
times the shares of software.py, give these rates again. What cannot be measured here (e.g. the
network, on a single host) is taken from a known device or from the fastest path, and `sources` says
so.
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
from spmdtrain.planner.cost.hardware import DEVICES, NAME_OF_DEVICE_KIND, Hardware
from spmdtrain.planner.cost.software import LINK_SHARE, MEMORY_SHARE

LONGEST = 0.3  # seconds that one timed call may take before sizes stop growing
REPEATS = 5
FALLBACK_MEMORY = 2**33  # bytes, if the size is unknown


def calibrate() -> dict[str, Any]:
    """Returns the figures of `Hardware` and, under "sources", the origin of each."""
    device = jax.devices()[0]
    known = DEVICES.get(NAME_OF_DEVICE_KIND.get(device.device_kind, ""))
    figures: dict[str, Any] = {
        "bfloat16": matmul_rate("bfloat16"),
        "float32": matmul_rate("float32"),
        "matmul": 1.0,
        "memory_bandwidth": copy_rate() / MEMORY_SHARE,
        "memory": _memory(device),
        "cores": known.cores if known else getattr(device, "core_count", None) or 1,
        "per_host": jax.local_device_count(),
        "power": known.power if known else 1.0,
    }
    sources = dict.fromkeys(figures, f"measured on {device.device_kind}")
    sources |= dict.fromkeys(("cores", "power"), f"data of {known.name}" if known else "not known")
    links, link_sources = _link_figures(known, fallback=figures["memory_bandwidth"])
    return figures | links | {"sources": sources | link_sources}


def _link_figures(
    known: Hardware | None, fallback: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns (figures, sources) of the links inside a host and of the network.

    The link between these devices is measured. The other one is that of the known device, or else
    as fast as the measured one or as `fallback`.
    """
    figures: dict[str, float] = {}
    sources: dict[str, str] = {}
    bandwidth, latency = ring()
    measured = "link" if jax.process_count() == 1 else "network"
    missing = ["link", "network"]
    if bandwidth:
        missing.remove(measured)
        figures[f"{measured}_bandwidth"] = bandwidth / LINK_SHARE
        figures[f"{measured}_latency"] = max(latency, 1e-9)
        source = f"measured, {jax.device_count()} devices"
        sources |= dict.fromkeys(figures, source)
    for name in missing:
        key = f"{name}_bandwidth"
        if known:
            figures[key] = getattr(known, key)
            sources[key] = f"not measured: that of {known.name}"
        else:
            figures[key] = figures.get(f"{measured}_bandwidth", fallback)
            sources[key] = "not measured: as the fastest path here"
    return figures, sources


def matmul_rate(dtype: str) -> float:
    """Returns the FLOP/s of the best square matmul on one device."""
    best = 0.0
    size = 256
    matmul = jax.jit(lambda a, b: a @ b)
    while size <= 16384:
        x = jnp.ones((size, size), dtype)
        seconds = timed(lambda x=x: matmul(x, x))
        best = max(best, 2 * size**3 / seconds)
        if seconds > LONGEST / 8:
            break
        size *= 2
    return best


def copy_rate() -> float:
    """Returns the bytes/s that one device reads and writes."""
    elements = 2**20
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: no fresh pages are timed
    while True:
        held = [jnp.zeros(elements, jnp.float32)]

        def once(held=held):
            held.append(add_one(held.pop()))
            return held[0]

        seconds = timed(once)
        # The largest array counts: smaller ones sit in caches.
        if seconds > LONGEST / 4 or elements >= 2**26:
            return 2 * 4 * elements / seconds
        elements *= 4


def ring() -> tuple[float, float]:
    """Returns (bytes/s, seconds per hop) of an all-reduce over all devices; (0, 0) for one."""
    count = jax.device_count()
    if count == 1:
        return 0.0, 0.0
    mesh = Mesh(np.array(jax.devices()), ("all",))
    all_reduce = jax.shard_map(
        lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P(None), out_specs=P(None)
    )
    replicated = NamedSharding(mesh, P(None))

    def seconds(elements: int) -> float:
        x = jax.jit(lambda: jnp.zeros(elements, jnp.float32), out_shardings=replicated)()
        return timed(lambda: jax.jit(all_reduce)(x))

    # The difference of two sizes leaves the bandwidth; the small one is all latency.
    small = 2**8
    large = 2**22
    small_seconds = seconds(small)
    large_seconds = seconds(large)
    hops = 2 * (count - 1)
    moved = hops / count * 4 * (large - small)
    return moved / max(large_seconds - small_seconds, 1e-9), small_seconds / hops


def timed(run: Callable[[], jax.Array]) -> float:
    """Returns the median seconds of a call, after a first call that compiles."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return sorted(taken)[REPEATS // 2]


def _memory(device: jax.Device) -> float:
    """Returns the bytes that a device offers; on a CPU, its share of the host's."""
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, NotImplementedError):
        limit = None
    if limit:
        return float(limit)
    return _host_memory() / jax.local_device_count()


def _host_memory() -> int:
    path = Path("/proc/meminfo")
    if not path.exists():
        return FALLBACK_MEMORY
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemTotal"):
            kibibytes = int(line.split()[1])
            return 1024 * kibibytes
    return FALLBACK_MEMORY


def write(measured: dict[str, Any], path: Path) -> None:
    """Writes the TOML file that `--hardware` reads."""
    figures = {key: value for key, value in measured.items() if key != "sources"}
    lines = ["# Written by `spmdtrain calibrate`: this machine, for --hardware."]
    lines += [f"{key} = {_number(value)}" for key, value in figures.items()]
    lines += ["", "[sources]"]
    lines += [f'{key} = "{text}"' for key, text in measured["sources"].items()]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if math.isfinite(value) else "0.0"
