"""`spmdtrain doctor`: examines the machine as a run would see it, and reports what is wrong."""

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import re
import resource
import shutil
from pathlib import Path

from spmdtrain.cli.devices import has_nvidia_driver, start_jax
from spmdtrain.cli.machine import measured
from spmdtrain.cli.machine.problems import Facts, problems
from spmdtrain.cli.shared_arguments import add_devices
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


def add_doctor(commands) -> None:
    """Adds the command `doctor` and its arguments."""
    examine = commands.add_parser(
        "doctor",
        help="examine devices, versions, libraries and flags; say how to fix what is wrong",
    )
    examine.add_argument(
        "--measure",
        action="store_true",
        help="measure matmuls, memory, links and the disk, and name what is slow",
    )
    examine.add_argument("--json", action="store_true", help="print JSON")
    add_devices(examine)
    examine.set_defaults(command=run_doctor)


def run_doctor(parsed: argparse.Namespace) -> int:
    """Prints the facts about this machine. Returns a config error's code if anything is wrong."""
    facts = facts_of(parsed)
    faults = problems(facts)
    if parsed.measure and facts["devices"]:
        facts["measured"] = measured.measure()
        faults += measured.slow(facts["measured"])
    if parsed.json:
        print(json.dumps(facts | {"problems": [f"{what}; try {fix}" for what, fix in faults]}))
    else:
        print(describe(facts))
        if "measured" in facts:
            print("\n".join(measured.describe(facts["measured"])))
        for what, fix in faults:
            print(f"wrong: {what}; try {fix}")
        if not faults:
            print("nothing is wrong")
    return ConfigError.exit_code if faults else DONE


def facts_of(parsed: argparse.Namespace) -> Facts:
    """Collects versions, devices, driver and limits; jax starts as it does in a run."""
    logged: list[str] = []
    listener = _Listener(logged)
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
        "device_memory": min((size for size in memory if size), default=None),
        "failure": failure,
        "said_by_jax": logged,
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
    """A log handler that collects the errors that jax logs while it starts."""

    def __init__(self, messages: list[str]):
        super().__init__(logging.ERROR)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else ""
        self._messages.append(" ".join(f"{record.getMessage()} {cause}".split())[:300])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_wheels() -> dict[str, str]:
    versions = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if CUDA_WHEELS.fullmatch(name):
            versions[name] = package.version
    return dict(sorted(versions.items()))


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
