"""`spmdtrain train`: trains a run, or resumes it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.devices import opens_gpus, start_jax
from spmdtrain.cli.shared_arguments import add_config, add_devices, positive_int
from spmdtrain.config import DONE, UserError, load, to_toml
from spmdtrain.processes import pulse
from spmdtrain.processes.scheduler import is_first
from spmdtrain.running.report import stages

if TYPE_CHECKING:
    from spmdtrain.config.schema import RunConfig
    from spmdtrain.running.guards.out_of_memory import OutOfMemoryError


def add_train(commands) -> None:
    """Adds the command `train` and its arguments."""
    train = commands.add_parser(
        "train", help="train, or resume an earlier run in the same directory"
    )
    add_config(train)
    train.add_argument("--run", metavar="DIR", help="run directory (default: runs/NAME_OF_CONFIG)")
    train.add_argument(
        "--fresh",
        action="store_true",
        help="start from scratch; an older run in the directory is set aside",
    )
    train.add_argument(
        "--step",
        type=positive_int,
        metavar="N",
        help="go back to this checkpoint; those of later steps are set aside",
    )
    train.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved config with origins, and exit",
    )
    train.add_argument(
        "--hardware",
        metavar="NAME",
        help="predict the run for this device (default: the local GPU, if it is described)",
    )
    add_devices(train)
    train.set_defaults(command=run_train)


def run_train(parsed: argparse.Namespace) -> int:
    """Trains or resumes a run. Returns PREEMPTED if a signal made it stop and save."""
    pulse.begin()
    if pulse.is_watched():
        from spmdtrain.processes.snapshots import handed_slots

        handed_slots.take()
    config = load(parsed.config, parsed.set)
    if parsed.print_config:
        from spmdtrain.processes import xla_flags

        print(f"{xla_flags.as_comment()}\n{to_toml(config)}", end="")
        return DONE
    directory = f"runs/{Path(parsed.config).stem}" if parsed.run is None else parsed.run
    if parsed.hardware is not None:
        from spmdtrain.planner.cost.hardware import hardware

        hardware(parsed.hardware)  # refuses a typo before jax looks for devices
    with stages.shown(quiet=not is_first(parsed.process)):
        return _train(parsed, config, directory)


def _train(parsed: argparse.Namespace, config: "RunConfig", directory: str) -> int:
    _measure_kernels(parsed, config)
    stages.enter("starting jax")
    start_jax(parsed, keeps_memory=True)
    from spmdtrain.running.guards.out_of_memory import OutOfMemoryError
    from spmdtrain.running.loop import run

    prediction = _prediction(config, parsed.hardware)
    try:
        outcome = run(
            config, directory, fresh=parsed.fresh, step=parsed.step, prediction=prediction
        )
    except OutOfMemoryError as error:
        raise _with_remedy(error) from None
    pulse.tell(pulse.DONE, outcome.step)
    return outcome.exit_code


def _measure_kernels(parsed: argparse.Namespace, config: "RunConfig") -> None:
    if config.kernels.tune == "off" or not opens_gpus(parsed):
        return
    from spmdtrain.cli.machine.kernels import before_training

    before_training(parsed, config)


def _with_remedy(error: "OutOfMemoryError") -> "OutOfMemoryError":
    """Returns the error with the cheapest change that fits, if the planner knows one."""
    from spmdtrain.planner.settings.remedy import cheapest_change

    if not error.needed or not error.available:
        return error
    setup = error.setup
    sizes = dict(setup.mesh.shape)
    settings = cheapest_change(setup.config, sizes, error.available / error.needed)
    if not settings:
        return error
    return error.with_fix(" ".join(f"--set {setting}" for setting in settings))


def _prediction(config, name: str | None):
    """Predicts time and memory of a step on the hardware `name`, or else on the local device.

    Without a `name`, None if the device is not described or the estimate is refused. Every process
    predicts, so that either all are refused or none.
    """
    import jax

    from pallas_kernels import gpus

    listed = gpus.find(jax.devices()[0].device_kind)
    known = name or (listed and listed.name)
    if known is None:
        return None
    from spmdtrain.planner.cost.hardware import hardware
    from spmdtrain.planner.cost.step_time import BOUND_BY
    from spmdtrain.planner.estimate import estimate
    from spmdtrain.running.report.summary import Prediction

    try:
        cost = estimate(config, jax.device_count(), hardware(known))
    except UserError:
        if name:
            raise
        return None  # no hardware was named; the run itself reports what is wrong
    time, memory = cost.time, cost.memory
    parts = {term: time.scale * seconds for term, seconds in time.terms.items()}
    held = {name: count for name, count in memory.by_category().items() if name != "total"}
    bounds = {term: BOUND_BY[term] for term in parts}
    return Prediction(cost.hardware.name, time.seconds, memory.total, parts, held, bounds)
