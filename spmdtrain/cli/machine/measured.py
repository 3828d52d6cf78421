"""Compares this machine's speeds with the expected ones: `spmdtrain doctor --measure`.

Each device multiplies, copies, and exchanges with the host and with each other device; all devices
form a ring; the disk writes and reads. Figures are FLOP/s and bytes/s. A small model's gradients in
bfloat16 are held against those in float32, as its kernels and libraries compute them here.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from pallas_kernels import gpus

DISK_BYTES = 2**27
DISK_SECONDS = 3.0  # after which a slow disk is measured well enough
CHUNK = 2**23
LINK_BYTES = {"gpu": 2**26, "cpu": 2**20}
# A figure below these shares is reported as slow: of the median of its kind, and of the data sheet.
OF_OTHERS = {"matmul": 0.9, "copy": 0.9, "to_device": 0.7, "from_device": 0.7}
OF_SHEET = {"matmul": 0.6, "copy": 0.75}
PAIR_OF_OTHERS = 0.7
SLOWEST_DISK = 100e6  # bytes/s

WORDS = {
    "matmul": "bfloat16 matmul",
    "copy": "copy in memory",
    "to_device": "copy from the host",
    "from_device": "copy to the host",
}

Figures = dict[str, Any]


def rate(name: str, value: float) -> str:
    """Returns a figure with its unit: FLOP/s for matmuls, bytes/s for everything else."""
    return f"{value / 1e12:.4g} TFLOP/s" if name == "matmul" else f"{value / 1e9:.4g} GB/s"


def measure(folder: str = ".") -> Figures:
    """Returns the figures of this machine; `folder` is on the disk that is measured."""
    import jax

    from spmdtrain.planner.calibrate import ring

    devices = jax.local_devices()
    pairs = [(a, b) for a in devices for b in devices if a.id < b.id]
    figures = {"devices": [_device(device) for device in devices]}
    figures["pairs"] = [
        {"from": a.id, "to": b.id, "rate": _transfer(a, b)} for a, b in pairs if a.platform == "gpu"
    ]
    bandwidth, latency = ring()
    ring_of_all = {"rate": bandwidth, "seconds": latency}
    return figures | {"ring": ring_of_all, "disk": _disk(folder), "gradients": _gradients()}


def _gradients() -> Figures:
    """Compares gradients in bfloat16 with those in float32, on the first device."""
    from spmdtrain.config import RunConfig
    from spmdtrain.lab.certify.cover import Layout
    from spmdtrain.lab.certify.shrink import shrink
    from spmdtrain.lab.certify.stepper import Own
    from spmdtrain.lab.certify.witnesses.own_precision import narrow_gradients

    config = RunConfig(precision={"compute": "bfloat16"})
    wide, narrow = (shrink(config, precision=which).config for which in ("float32", "asked"))
    witness = narrow_gradients(wide, narrow, Layout((), "one device"), Own())
    return {"holds": witness.holds, "said": witness.details}


def _device(device) -> Figures:
    import jax

    from spmdtrain.planner.calibrate import copy_rate, matmul_rate

    with jax.default_device(device):
        matmul = matmul_rate("bfloat16")
        copy = copy_rate()
    host = jax.devices("cpu")[0]
    return {
        "device": device.id,
        "kind": device.device_kind,
        "matmul": matmul,
        "copy": copy,
        "to_device": _transfer(host, device),
        "from_device": _transfer(device, host),
    }


def _transfer(source, target) -> float:
    """Returns the bytes/s from one device to another, or to and from the host."""
    import jax
    import numpy as np

    from spmdtrain.planner.calibrate import timed

    size = min(LINK_BYTES.get(device.platform, 2**26) for device in (source, target))
    if "gpu" in (source.platform, target.platform):
        size = LINK_BYTES["gpu"]
    x = jax.device_put(np.ones(size // 4, np.float32), source)
    return size / timed(lambda: jax.device_put(x, target, may_alias=False))


def _disk(folder: str) -> Figures:
    """Returns the bytes/s at which the disk writes a file, and reads it back."""
    block = os.urandom(CHUNK)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        written = 0
        while written < DISK_BYTES and time.perf_counter() - start < DISK_SECONDS:
            written += file.write(block)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache is read
        file.seek(0)
        start = time.perf_counter()
        while file.read(CHUNK):
            pass
        return {"write": written / seconds, "read": written / (time.perf_counter() - start)}


def slow(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yields (what is slow or wrong, what to look at)."""
    # Simulated devices share the cores of the host: none of them is slow by itself.
    devices = [device for device in figures["devices"] if device["kind"] != "cpu"]
    for name, least in OF_OTHERS.items() if devices else ():
        usual = statistics.median(device[name] for device in devices)
        for device in devices:
            if device[name] < least * usual:
                what = f"device {device['device']}: {WORDS[name]} {rate(name, device[name])}"
                what += f", {device[name] / usual:.0%} of the median of all"
                yield what, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK,PCIE, or without it"
    for device in devices:
        for name, least in OF_SHEET.items():
            share = share_of_sheet(device, name)
            if share is not None and share < least:
                what = f"device {device['device']}: {WORDS[name]} {rate(name, device[name])}"
                what += f", {share:.0%} of the data sheet of {device['kind']}"
                yield what, "nvidia-smi: power limit, clocks, and who else computes there"
    if figures["pairs"]:
        usual = statistics.median(pair["rate"] for pair in figures["pairs"])
        for pair in figures["pairs"]:
            if pair["rate"] < PAIR_OF_OTHERS * usual:
                what = f"devices {pair['from']} and {pair['to']}: {rate('copy', pair['rate'])}"
                what += f", {pair['rate'] / usual:.0%} of the median of all pairs"
                yield what, "nvidia-smi topo -m, nvidia-smi nvlink -s"
    if not figures["gradients"]["holds"]:
        what = f"a step in bfloat16 is not that of float32: {figures['gradients']['said']}"
        yield what, "spmdtrain certify CONFIG here, and another jaxlib"
    for name, speed in figures["disk"].items():
        if speed < SLOWEST_DISK:
            yield f"the disk here: {name} {rate('copy', speed)}", "--run on another disk"


def share_of_sheet(device: Figures, name: str) -> float | None:
    """Returns the figure as a share of the data sheet's; None if that is not known."""
    listed = gpus.find(device["kind"])
    if listed is None or name not in OF_SHEET:
        return None
    return device[name] / (listed.bfloat16 if name == "matmul" else listed.memory_bandwidth)


def describe(figures: Figures) -> list[str]:
    """Describes the figures, a line each."""
    lines = []
    for device in figures["devices"]:
        parts = []
        for name in OF_OTHERS:
            share = share_of_sheet(device, name)
            sheet = "" if share is None else f" ({share:.0%} of the data sheet)"
            parts.append(f"{WORDS[name]} {rate(name, device[name])}{sheet}")
        lines.append(f"device {device['device']:<6}{', '.join(parts)}")
    rates = [pair["rate"] for pair in figures["pairs"]]
    if rates:
        low, high = rate("copy", min(rates)), rate("copy", max(rates))
        lines.append(f"pairs        {len(rates)}, from {low} to {high}")
    if figures["ring"]["rate"]:
        hop = 1e6 * figures["ring"]["seconds"]
        lines.append(f"ring         {rate('copy', figures['ring']['rate'])}, {hop:.1f} us a hop")
    disk = ", ".join(f"{name} {rate('copy', speed)}" for name, speed in figures["disk"].items())
    return [
        *lines,
        f"disk here    {disk}",
        f"bfloat16     gradients: {figures['gradients']['said']}",
    ]
