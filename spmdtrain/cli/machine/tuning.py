"""Measures the kernels of a config: for `spmdtrain tune`, and for `train` before it opens a GPU."""

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.devices import has_nvidia_driver, without_devices
from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.config import DONE, ConfigError, load
from spmdtrain.config.schema import RunConfig
from spmdtrain.processes.processes import simulate_devices
from spmdtrain.running.report import stages

if TYPE_CHECKING:
    from pallas_kernels.calls import Call
    from pallas_kernels.tuning import Table

MOST_SECONDS = 900.0  # of all measuring before a run
# Decide nothing about the calls of a step.
OTHER_SECTIONS = ("optimizer", "eval", "checkpoint", "guard", "log", "kernels")


def tune(parsed: argparse.Namespace) -> int:
    """Measures what is not known yet of the calls of a config's step, and prints it all."""
    environment = dict(os.environ)  # of the process that measures: this one opens no GPU
    config = load(parsed.config, parsed.set)
    if parsed.export is not None:
        refuse_unwritable(Path(parsed.export))
    count = device_count(config, parsed.devices)
    calls = _calls(config, count)
    with _table(parsed.interpreted) as table:
        gpu = _measure(parsed, config, calls, table, environment)
        if gpu is None:
            raise ConfigError("no kernel could be measured", fix="spmdtrain doctor")
        entries = [(call, table.entry(gpu, call.name)) for call in calls]
        known = [(call, entry) for call, entry in entries if entry is not None]
        if parsed.export is not None:
            _export(table, gpu, Path(parsed.export))
    if parsed.json:
        by_name = {call.name: entry for call, entry in known}
        print(json.dumps({"gpu": gpu, "machine": table.machine, "calls": by_name}))
    else:
        print(describe(gpu, table, known))
    return DONE


def _calls(config: RunConfig, count: int) -> "list[Call]":
    """Returns the calls of the step, traced on as many devices as the run has, all simulated."""
    if "jax" not in sys.modules:  # else they were simulated by whoever started it
        simulate_devices(count)
    without_devices()
    import jax

    from spmdtrain.planner.estimate import with_vocab
    from spmdtrain.running.start.kernels import calls_of_step
    from spmdtrain.train.setup import shard

    setup = shard(with_vocab(config), devices=jax.devices()[:count])
    return calls_of_step(setup)


@contextlib.contextmanager
def _table(interpreted: bool):
    """Yields the table of this user; times of interpreted kernels go into one that is dropped."""
    from pallas_kernels.tuning import Table

    if not interpreted:
        yield Table()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Table(Path(folder))


def _measure(parsed, config, calls, table, environment) -> str | None:
    """Returns jax's name of the GPU; None if it could not be found out."""
    from pallas_kernels.tuning import tune as tune_calls
    from pallas_kernels.tuning.measure import WORKER, Limits, Process
    from pallas_kernels.tuning.table import gpu_models

    for remark in table.remarks:
        print(remark, file=sys.stderr)
    command = WORKER
    limits = Limits()
    if parsed.interpreted:
        command = (*WORKER, "--interpreted")
        limits = Limits(step=200.0, call=600.0)
    models = gpu_models()
    digest = program(config, device_count(config, parsed.devices))
    tune_calls(
        calls,
        table,
        lambda line: print(line, file=sys.stderr, flush=True),
        gpu=models[0] if models else None,
        again=parsed.again,
        program=digest,
        process=Process(command, environment, limits),
    )
    known = table.program(digest)
    return known["gpu"] if known else None


def describe(gpu: str, table: "Table", known: "list[tuple[Call, dict[str, Any]]]") -> str:
    """Returns the table for a person: each call, and its implementations, the fastest first."""
    from pallas_kernels.tuning.work import share_of_sheet

    machine = ", ".join(f"{name} {value}" for name, value in table.machine.items())
    lines = [f"{gpu}: {machine}", "forward and backward; *: taken", ""]
    for call, entry in sorted(known, key=lambda pair: pair[0].name):
        lines.append(call.name)
        times = entry.get("milliseconds", {})
        for each in sorted({*times, entry["implementation"]}, key=lambda each: times.get(each, 0)):
            star = "*" if each == entry["implementation"] else " "
            if each not in times:
                lines.append(f"  {star} {each:18} the only one here")
                continue
            share = share_of_sheet(gpu, call, times[each] / 1e3)
            shown = "" if share is None else f" {share:5.0%} of the data sheet"
            lines.append(f"  {star} {each:18} {times[each]:9.3f} ms{shown}")
        for key, words in (("faults", "not used"), ("refused", "refuses")):
            lines += [f"    {each:18} {words}: {why}" for each, why in entry.get(key, {}).items()]
        if entry.get("remark"):
            lines.append(f"    {entry['remark']}")
    return "\n".join(lines)


def _export(table: "Table", gpu: str, path: Path) -> None:
    document = table.document()
    document["gpus"] = {gpu: document["gpus"].get(gpu, {})}
    document["programs"] = {}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def device_count(config: RunConfig, given: int | None) -> int:
    """Returns the number of devices of a run: as given, as its mesh says, or as are here."""
    from pallas_kernels.tuning.table import gpu_models

    sizes = config.mesh.sizes.values()
    fixed = math.prod(size for size in sizes if size != -1)
    if given is not None or -1 not in sizes:
        return given or fixed
    here = len(gpu_models()) or 1
    return fixed * max(here // fixed, 1)


def program(config: RunConfig, count: int) -> str:
    """Returns a digest of all that decides which calls a step has, and on which GPUs."""
    from pallas_kernels.tuning.table import gpu_models

    settings = config.model_dump(mode="json")
    deciding = {name: each for name, each in settings.items() if name not in OTHER_SECTIONS}
    deciding["train"] |= {"steps": None, "epochs": None, "seed": None}
    text = json.dumps([deciding, count, gpu_models()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- before a run


def before_training(parsed: argparse.Namespace, config: RunConfig) -> None:
    """Measures the kernels of a run that this machine does not know, before it opens a GPU.

    The first process of a machine measures, and the others wait for it. Whatever goes wrong costs a
    line: the run goes on, with the fixed order.
    """
    hidden = os.environ.get("JAX_PLATFORMS") == "cpu" or parsed.simulate_devices is not None
    if config.kernels.tune == "off" or hidden or not has_nvidia_driver():
        return
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
            print(f"kernels: not measured: {why}; a fixed order is taken", file=sys.stderr)
