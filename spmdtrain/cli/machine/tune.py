"""`spmdtrain tune`: measures the kernels of a config on this GPU."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.devices import without_devices
from spmdtrain.cli.machine.kernels import device_count, program
from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.cli.shared_arguments import add_config, positive_int
from spmdtrain.config import DONE, ConfigError, load
from spmdtrain.config.schema import RunConfig
from spmdtrain.processes.processes import simulate_devices

if TYPE_CHECKING:
    from pallas_kernels.calls import Call
    from pallas_kernels.tuning import Table


def add_tune(commands) -> None:
    """Adds the command `tune` and its arguments."""
    tune = commands.add_parser(
        "tune", help="measure the kernels of a config on this GPU; train does so by itself"
    )
    add_config(tune)
    tune.add_argument(
        "--devices",
        type=positive_int,
        metavar="N",
        help="devices of the run (default: the GPUs of this machine)",
    )
    tune.add_argument("--again", action="store_true", help="measure again what is already known")
    tune.add_argument(
        "--interpreted",
        action="store_true",
        help="interpret kernels on the CPU, for tests of tiny configs; nothing is remembered",
    )
    tune.add_argument(
        "--export",
        metavar="FILE",
        help="write what is known about this GPU to a file, for other machines",
    )
    tune.add_argument("--json", action="store_true", help="print JSON")
    tune.set_defaults(command=run_tune)


def run_tune(parsed: argparse.Namespace) -> int:
    """Measures the calls of a config's step that are not known yet, and prints all of them."""
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
    """Returns the calls of the step, traced on as many simulated devices as the run has."""
    if "jax" not in sys.modules:  # otherwise the caller has simulated them
        simulate_devices(count)
    without_devices()
    import jax

    from spmdtrain.planner.estimate import with_vocab
    from spmdtrain.running.start.kernels import calls_of_step
    from spmdtrain.train.shard import shard

    setup = shard(with_vocab(config), devices=jax.devices()[:count])
    return calls_of_step(setup)


@contextlib.contextmanager
def _table(interpreted: bool):
    """Yields the user's table of timings, or for interpreted kernels one that is thrown away."""
    from pallas_kernels.tuning import Table

    if not interpreted:
        yield Table()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Table(Path(folder))


def _measure(parsed, config, calls, table, environment) -> str | None:
    """Returns jax's name of the GPU, or None if it could not be determined."""
    from pallas_kernels.tuning.measure import WORKER, Limits, Process
    from pallas_kernels.tuning.table import gpu_models
    from pallas_kernels.tuning.tune import tune as tune_calls

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
    """Describes the table: each call, and its implementations, fastest first."""
    from pallas_kernels.tuning.work import share_of_sheet

    machine = ", ".join(f"{name} {value}" for name, value in table.machine.items())
    lines = [f"{gpu}: {machine}", "forward and backward; *: taken", ""]
    for call, entry in sorted(known, key=lambda pair: pair[0].name):
        lines.append(call.name)
        times = entry.get("milliseconds", {})
        taken = entry["implementation"]
        for name in sorted({*times, taken}, key=lambda name: times.get(name, 0)):
            star = "*" if name == taken else " "
            if name not in times:
                lines.append(f"  {star} {name:18} the only one here")
                continue
            share = share_of_sheet(gpu, call, times[name] / 1e3)
            shown = "" if share is None else f" {share:5.0%} of the data sheet"
            lines.append(f"  {star} {name:18} {times[name]:9.3f} ms{shown}")
        for key, words in (("faults", "not used"), ("refused", "refuses")):
            lines += [f"    {name:18} {words}: {why}" for name, why in entry.get(key, {}).items()]
        if entry.get("remark"):
            lines.append(f"    {entry['remark']}")
    return "\n".join(lines)


def _export(table: "Table", gpu: str, path: Path) -> None:
    document = table.document()
    document["gpus"] = {gpu: document["gpus"].get(gpu, {})}
    document["programs"] = {}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
