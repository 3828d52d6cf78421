"""Writes RUN/starts/N.json once the step has compiled: what the Nth start of a run ran, where, and
how.

A replay takes the settings and XLA's flags from it. Everything else that may change numbers
(versions, sources, the kind of device, the compiled program itself) is recorded for comparison.
"""

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from spmdtrain.checkpoints.identity import config_document
from spmdtrain.checkpoints.model_code import qualified_name
from spmdtrain.config.run_files import STARTS
from spmdtrain.data.source import Data
from spmdtrain.running.report.json_lines import write_document
from spmdtrain.running.start.agreement import our_sources
from spmdtrain.train.setup import Setup

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_dtypes"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin"),
)
# Variables that change what jax and XLA compute, or where. Others may hold secrets.
VARIABLES = ("JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "TF_CPP_")


def write_start(
    directory: Path,
    setup: Setup,
    data: Data,
    done: int,
    report: Mapping[str, Any],
    seams: Mapping[str, Any],
) -> None:
    """Writes the record of a start after `done` steps; only process 0 does.

    `report` is that of compiled.json, and `seams` are what the caller replaced.
    """
    if jax.process_index() > 0:
        return
    folder = directory / STARTS
    numbers = [int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()]
    document = _document(setup, data, report) | {
        "from_step": done,
        "seams": {name: qualified_name(part) for name, part in seams.items() if part is not None},
    }
    folder.mkdir(exist_ok=True)
    write_document(folder / f"{max(numbers, default=0) + 1}.json", document)


def _document(setup: Setup, data: Data, report: Mapping[str, Any]) -> dict[str, Any]:
    devices = list(setup.mesh.devices.flat)
    config = config_document(setup, data)
    tokenizer = config.pop("tokenizer")  # it may be long
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "argv": sys.argv,
        "config_hash": digest(config["config"]),
        "tokenizer_hash": tokenizer and digest(tokenizer),
        "versions": versions(),
        "sources": our_sources(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
        "mesh": {axis: size for axis, size in setup.mesh.shape.items()},
        "devices": [device.id for device in devices],
        "device_kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "processes": jax.process_count(),
        "program": report.get("program"),
        "compile_seconds": report["compile_seconds"],
    } | config


def versions() -> dict[str, str]:
    """Returns the versions of Python and of those packages for computing that are installed."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def digest(value: Any) -> str:
    """Returns a hash of a JSON value: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
