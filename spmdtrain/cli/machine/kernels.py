"""Measures kernels of a run that are new to this machine, before `train` opens a GPU."""

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import sys

from spmdtrain.config.schema import RunConfig
from spmdtrain.running.report import stages

MOST_SECONDS = 900.0  # of all measuring before a run
# Sections that do not change the calls of a step.
OTHER_SECTIONS = ("optimizer", "eval", "checkpoint", "guard", "log", "kernels")


def before_training(parsed: argparse.Namespace, config: RunConfig) -> None:
    """Measures the kernels of a run that are new to this machine, before it opens a GPU.

    The first process of a machine measures, and the others wait for it. If anything goes wrong, one
    line says so and the run continues with the fixed order.
    """
    from pallas_kernels.tuning import Table

    count = device_count(config, None)
    digest = program(config, count)
    table = Table()
    again = config.kernels.tune == "again"
    if table.program(digest) is not None and not again:
        return
    stages.enter("measuring kernels")
    command = [sys.executable, "-m", "spmdtrain.cli", "tune", parsed.config]
    command += ["--devices", str(count), "--json"]
    for setting in parsed.set:
        command += ["--set", setting]
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # no folder: each process measures for itself
            held.enter_context(table.locked("tuning"))
        table.read_again()
        if again or table.program(digest) is None:
            _run(command + ["--again"] * again)


def _run(command: list[str]) -> None:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = child.wait(MOST_SECONDS)
        why = f"it ended with code {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = f"it took more than {MOST_SECONDS:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if why:
        with stages.aside():
            print(f"kernels: not measured: {why}; using the fixed order", file=sys.stderr)


def device_count(config: RunConfig, requested: int | None) -> int:
    """Returns the number of devices of a run: as requested, by its mesh, or all of this machine."""
    from pallas_kernels.tuning.table import gpu_models

    sizes = config.mesh.sizes.values()
    fixed = math.prod(size for size in sizes if size != -1)
    if requested is not None or -1 not in sizes:
        return requested or fixed
    here = len(gpu_models()) or 1
    return fixed * max(here // fixed, 1)


def program(config: RunConfig, count: int) -> str:
    """Returns a digest of everything that decides which calls a step has, and on which GPUs."""
    from pallas_kernels.tuning.table import gpu_models

    settings = config.model_dump(mode="json")
    deciding = {name: value for name, value in settings.items() if name not in OTHER_SECTIONS}
    deciding["train"] |= {"steps": None, "epochs": None, "seed": None}
    text = json.dumps([deciding, count, gpu_models()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
