"""Runs `launch`: the processes of a run, watched and restarted."""

import argparse
import os
from pathlib import Path

from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.config import ConfigError
from spmdtrain.running.report.json_lines import write_document


def launch(parsed: argparse.Namespace) -> int:
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
    parsed.make_parser().parse_args(command)  # a typo is refused before a process starts
    if parsed.report is not None:
        refuse_unwritable(Path(parsed.report))  # before hours of training
    place = find_place(os.environ, parsed.local_processes)
    launcher = Launcher(command, place, parsed.local_processes, parsed.step_seconds)
    code = launcher.run()
    time = launcher.goodput.report()
    spent = {what: seconds for what, seconds in time["seconds"].items() if seconds >= 0.5}
    parts = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in spent.items())
    say(f"{time['wall_seconds']:.0f} s, {time['goodput']:.0%} of them training: {parts}")
    if parsed.report is not None:
        report = {**time, "attempts": launcher.attempts, "exit_code": code}
        write_document(Path(parsed.report), report)
    return code
