"""Examines the machine as a run would: devices, versions, libraries, flags, and problems."""

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdtrain.cli.devices import has_nvidia_driver, start_jax
from spmdtrain.cli.machine import measured
from spmdtrain.config import DONE, ConfigError

OURS = ("spmdtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "pydantic", "numpy")
# Names of wheels, with any CUDA version at the end.
CUDA_WHEELS = re.compile(
    r"(jax-cuda\d+-(?:plugin|pjrt))|nvidia-(nccl|cudnn|cublas|nvshmem)(-cu\d+)?"
)
VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "JAX_ENABLE_X64",
    "JAX_COMPILATION_CACHE_DIR",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
)
OLDEST_JAX = (0, 10)
FIRST_JAX_BEYOND = (0, 13)
FEWEST_FILES = 1024  # open at once: token files, checkpoints and sockets
LEAST_DISK = 10e9  # bytes

Facts = dict[str, Any]


def doctor(parsed: argparse.Namespace) -> int:
    """Prints what a run would find here. Returns a config error's code if something is wrong."""
    facts = gather(parsed)
    found = problems(facts)
    if parsed.measure and facts["devices"]:
        facts["measured"] = measured.measure()
        found += measured.slow(facts["measured"])
    if parsed.json:
        print(json.dumps(facts | {"problems": [f"{what}; try {fix}" for what, fix in found]}))
    else:
        print(describe(facts))
        if "measured" in facts:
            print("\n".join(measured.describe(facts["measured"])))
        for what, fix in found:
            print(f"wrong: {what}; try {fix}")
        if not found:
            print("nothing is wrong")
    return ConfigError.exit_code if found else DONE


def gather(parsed: argparse.Namespace) -> Facts:
    """Collects versions, devices, driver and limits; jax starts as it does in a run."""
    said: list[str] = []
    listener = _Listener(said)
    logging.getLogger("jax").addHandler(listener)
    start_jax(parsed, find_devices=False)
    import jax

    try:
        devices = jax.local_devices()
        failure = ""
    except RuntimeError as error:  # no backend could be started
        devices = []
        failure = " ".join(str(error).split())[:300]
    logging.getLogger("jax").removeHandler(listener)
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    memory = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    driver = Path("/proc/driver/nvidia/version")
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: _version(name) for name in OURS},
        "cuda": _cuda_wheels(),
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else None,
        "has_driver": has_nvidia_driver(),
        "devices": kinds,
        "platform": devices[0].platform if devices else None,
        "device_memory": min((each for each in memory if each), default=None),
        "failure": failure,
        "said_by_jax": said,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith("NCCL_")
        },
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "disk_free": shutil.disk_usage(".").free,
        "cores": os.cpu_count(),
    }


class _Listener(logging.Handler):
    """Keeps the errors that jax logs while it starts."""

    def __init__(self, said: list[str]):
        super().__init__(logging.ERROR)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else ""
        self._said.append(" ".join(f"{record.getMessage()} {cause}".split())[:300])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_wheels() -> dict[str, str]:
    found = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if CUDA_WHEELS.fullmatch(name):
            found[name] = package.version
    return dict(sorted(found.items()))


def problems(facts: Facts) -> list[tuple[str, str]]:
    """Lists (what is wrong, how to fix it), the gravest first."""
    return [*_of_versions(facts), *_of_devices(facts), *_of_machine(facts)]


def _of_versions(facts: Facts) -> Iterator[tuple[str, str]]:
    jax_version = facts["versions"]["jax"] or "0"
    jaxlib_version = facts["versions"]["jaxlib"] or "0"
    if not OLDEST_JAX <= _numbers(jax_version) < FIRST_JAX_BEYOND:
        fix = f"pip install 'jax>={_dotted(OLDEST_JAX)},<{_dotted(FIRST_JAX_BEYOND)}'"
        yield f"jax {jax_version} is not tested with this version", fix
    if _numbers(jax_version) != _numbers(jaxlib_version):
        what = f"jax {jax_version} and jaxlib {jaxlib_version} do not belong together"
        yield what, f"pip install jaxlib=={jax_version}"
    for name, version in _plugins(facts).items():
        if _numbers(version) != _numbers(jax_version):
            what = f"{name} {version} does not match jax {jax_version}"
            yield what, f"pip install {name}=={jax_version}"


def _of_devices(facts: Facts) -> Iterator[tuple[str, str]]:
    environment = facts["environment"]
    if facts["failure"]:
        yield f"jax finds no device: {facts['failure']}", "JAX_PLATFORMS= to look for all kinds"
    hidden = environment.get("JAX_PLATFORMS") == "cpu"
    if facts["has_driver"] and facts["platform"] == "cpu" and not hidden:
        if _plugins(facts):
            why = "; ".join(facts["said_by_jax"]) or "its CUDA plugin found none"
            what = f"there is an NVIDIA driver, but jax uses the CPU: {why}"
            yield what, "nvidia-smi, and LD_LIBRARY_PATH without other CUDA libraries"
        else:
            what = "there is an NVIDIA driver, but jax has no CUDA plugin"
            yield what, "pip install 'spmdtrain[cuda13]', or [cuda12] for a driver below 580"
    if facts["platform"] != "gpu":
        return
    libraries = environment.get("LD_LIBRARY_PATH", "")
    if "cuda" in libraries or "nvidia" in libraries:
        what = f"LD_LIBRARY_PATH={libraries} comes before the CUDA libraries of jax's wheels"
        yield what, "unset LD_LIBRARY_PATH"
    if not any("nccl" in name for name in facts["cuda"]) and sum(facts["devices"].values()) > 1:
        yield (
            "NCCL, through which GPUs communicate, is not installed",
            "pip install nvidia-nccl-cu13",
        )


def _of_machine(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts["environment"].get("JAX_ENABLE_X64", "").lower() in ("1", "true"):
        yield "JAX_ENABLE_X64 turns all counters into 64-bit integers", "unset JAX_ENABLE_X64"
    if 0 <= facts["open_files"] < FEWEST_FILES:
        what = f"only {facts['open_files']} files may be open at once"
        yield what, f"ulimit -n {4 * FEWEST_FILES}"
    if facts["disk_free"] < LEAST_DISK:
        what = f"{facts['disk_free'] / 1e9:.1f} GB free here, where checkpoints go"
        yield what, "--run on another disk"


def _plugins(facts: Facts) -> dict[str, str]:
    """Returns jax's CUDA plugins and their versions."""
    return {name: each for name, each in facts["cuda"].items() if name.startswith("jax-")}


def describe(facts: Facts) -> str:
    """Describes the facts, one line each."""
    from pallas_kernels import gpus
    from spmdtrain.processes import xla_flags

    lines = [f"python       {facts['python']} on {facts['system']}, {facts['cores']} cores"]
    named = [f"{name} {version or 'missing'}" for name, version in facts["versions"].items()]
    lines.append(f"packages     {', '.join(named)}")
    for kind, count in facts["devices"].items():
        line = f"devices      {count} x {kind}"
        if facts["device_memory"]:
            line += f", {facts['device_memory'] / 1e9:.1f} GB each for jax"
        if facts["platform"] == "gpu" and gpus.find(kind) is None:
            line += "; not in pallas_kernels/gpus.py, so MFU and predictions are unknown"
        lines.append(line)
    lines.append(f"driver       {facts['driver'] or 'no NVIDIA driver'}")
    wheels = [f"{name} {version}" for name, version in facts["cuda"].items()]
    lines.append(f"cuda         {', '.join(wheels) or 'no CUDA libraries installed'}")
    added = [str(flag) for flag in xla_flags.wanted()]
    lines.append(f"XLA flags    {os.environ.get('XLA_FLAGS') or 'none'}")
    lines.append(f"             a run on GPUs adds {' '.join(added) or 'none'}")
    settings = [f"{name}={value}" for name, value in facts["environment"].items()]
    lines.append(f"environment  {' '.join(settings) or 'nothing that matters'}")
    lines.append(f"disk         {facts['disk_free'] / 1e9:.0f} GB free here")
    return "\n".join(lines)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version: (0, 12) for 0.12.0.1."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
