"""`spmdtrain launch`: trains in processes that are watched and restarted."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.cli.shared_arguments import duration, positive_int
from spmdtrain.config import ConfigError, load
from spmdtrain.launch.patience import STEP_SECONDS
from spmdtrain.running.report.json_lines import write_document


def add_launch(commands, make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the command `launch` and its arguments.

    `make_parser` returns the parser of all commands, which parses the launched one.
    """
    launch = commands.add_parser(
        "launch", help="train in processes that are watched, and restarted when they fail"
    )
    launch.add_argument(
        "--local-processes",
        type=positive_int,
        default=1,
        metavar="N",
        help="processes on this host (default: %(default)s)",
    )
    launch.add_argument(
        "--step-seconds",
        type=_positive_seconds,
        default=STEP_SECONDS,
        metavar="S",
        help="seconds, or 5 times the longest step so far, after which a step counts as a hang "
        "(default: %(default)s)",
    )
    launch.add_argument("--report", metavar="FILE", help="write an account of the time as JSON")
    launch.add_argument(
        "command_line",
        nargs=argparse.REMAINDER,
        metavar="train ...",
        help="the run, with the arguments that it has without launch",
    )
    launch.set_defaults(command=run_launch, make_parser=make_parser)


def _positive_seconds(text: str) -> float:
    """Reads a number of seconds above 0."""
    seconds = duration(text)
    if not seconds:
        raise argparse.ArgumentTypeError("0 seconds is not a limit")
    return seconds


def run_launch(parsed: argparse.Namespace) -> int:
    """Launches a command. Returns the exit code of its last attempt."""
    from spmdtrain.launch.launch import Launcher, say
    from spmdtrain.launch.place import find_place

    command = [*parsed.command_line]
    if command[:1] == ["--"]:
        command = command[1:]
    if command[:1] != ["train"]:
        raise ConfigError(
            "launch starts a training run",
            asked=f"launch {' '.join(command)}".rstrip(),
            fix="spmdtrain launch train CONFIG, followed by other arguments of train",
        )
    train = parsed.make_parser().parse_args(command)  # refuses a typo before a process starts
    parsed.options |= train.options
    parsed.settable = train.settable
    if parsed.report is not None:
        refuse_unwritable(Path(parsed.report))  # before hours of training
    place = find_place(os.environ, parsed.local_processes)
    copies = place.hosts > 1 and load(train.config, train.set).checkpoint.memory_peer
    launcher = Launcher(command, place, parsed.local_processes, parsed.step_seconds, copies=copies)
    code = launcher.run()
    time = launcher.goodput.report()
    spent = {what: seconds for what, seconds in time["seconds"].items() if seconds >= 0.5}
    parts = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in spent.items())
    say(f"{time['wall_seconds']:.0f} s, {time['goodput']:.0%} of them training: {parts}")
    if parsed.report is not None:
        report = {**time, "attempts": launcher.attempts, "exit_code": code}
        write_document(Path(parsed.report), report)
    return code
