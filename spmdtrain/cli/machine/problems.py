"""Finds what is wrong with a machine from the facts that `doctor` gathers, and how to fix it."""

import re
from collections.abc import Iterator
from typing import Any

OLDEST_JAX = (0, 10)
FIRST_JAX_BEYOND = (0, 13)
FEWEST_FILES = 1024  # files open at once: token files, checkpoints and sockets
LEAST_DISK = 10e9  # bytes

Facts = dict[str, Any]


def problems(facts: Facts) -> list[tuple[str, str]]:
    """Returns pairs (what is wrong, how to fix it), the most serious first."""
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
    return {name: version for name, version in facts["cuda"].items() if name.startswith("jax-")}


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version: (0, 12) for 0.12.0.1."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
