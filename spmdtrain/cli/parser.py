"""Makes the parser of the command line: all commands, in the order of `--help`."""

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from spmdtrain.config import ConfigError
from spmdtrain.config.load import settings_called
from spmdtrain.config.near import did_you_mean

# In the order of `--help`.
COMMANDS = (
    "train",
    "launch",
    "import",
    "show",
    "report",
    "sample",
    "eval",
    "replay",
    "explain",
    "diff",
    "profile",
    "certify",
    "coordcheck",
    "export",
    "data",
    "tokenizer",
    "schedule",
    "estimate",
    "plan",
    "compare",
    "calibrate",
    "doctor",
    "tune",
)


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose usage errors are ConfigErrors."""

    def error(self, message: str):
        raise ConfigError(message + self._meant(message), fix=f"{self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parses as argparse does, but lets a command itself report an unknown argument.

        It knows its own options; argparse would leave this to the parser of all commands.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        # What an error may tell somebody to type behind this command: see typable.py.
        parsed.options = {*getattr(parsed, "options", ()), *self._option_string_actions}
        parsed.settable = getattr(parsed, "settable", ())
        return parsed, unknown

    def _meant(self, message: str) -> str:
        """Returns a suggestion for the first word that argparse does not know."""
        if unknown := re.match(r"unrecognized arguments: (.*)", message, re.S):
            words = [word.partition("=")[0] for word in unknown[1].split()]
            flags = [word for word in words if word.startswith("-")]
            keys = settings_called((flags or words)[0])
            if keys and "--set" in self._option_string_actions:
                return f", did you mean --set {' or --set '.join(f'{key}=...' for key in keys)}?"
            if flags:
                return did_you_mean(flags[0], self._option_string_actions)
        if unknown := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message, re.S):
            commands = [
                name for action in self._actions if action.choices for name in action.choices
            ]
            return did_you_mean(unknown[1], commands)
        return ""


class _Version(argparse.Action):
    """The action of --version, which looks the version up only when asked for."""

    def __call__(self, parser, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        from importlib.metadata import version

        print("spmdtrain", version("spmdtrain"))
        parser.exit()


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser. `parsed.command(parsed)` then runs the command and returns its code.

    With the name of a `command` it has only that one, and the files of the others are not imported.
    """
    parser = _Parser(
        prog="spmdtrain",
        description="Train transformers on any mesh of devices from one SPMD program.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS if command is None else (command,):
        _importing(name)(commands)
    return parser


def _importing(name: str) -> Callable[[Any], None]:
    """Returns the function that adds a command or a group of them; imports only their files."""
    match name:
        case "train":
            from spmdtrain.cli.run.train import add_train

            return add_train
        case "launch":
            from spmdtrain.cli.run.launch import add_launch

            return partial(add_launch, make_parser=make_parser)
        case "import":
            from spmdtrain.cli.published.import_ import add_import

            return add_import
        case "show":
            from spmdtrain.cli.run.show import add_show

            return add_show
        case "report":
            from spmdtrain.cli.run.report import add_report

            return add_report
        case "sample":
            from spmdtrain.cli.run.sample import add_sample

            return add_sample
        case "eval":
            from spmdtrain.cli.run.eval import add_eval

            return add_eval
        case "replay":
            from spmdtrain.cli.record.replay import add_replay

            return add_replay
        case "explain":
            from spmdtrain.cli.record.explain import add_explain

            return add_explain
        case "diff":
            from spmdtrain.cli.record.diff import add_diff

            return add_diff
        case "profile":
            from spmdtrain.cli.record.profile import add_profile

            return add_profile
        case "certify":
            from spmdtrain.cli.run.certify import add_certify

            return add_certify
        case "coordcheck":
            from spmdtrain.cli.run.coordcheck import add_coordcheck

            return add_coordcheck
        case "export":
            from spmdtrain.cli.published.export import add_export

            return add_export
        case "data":
            return _add_data
        case "tokenizer":
            return _add_tokenizer
        case "schedule":
            from spmdtrain.cli.planning.schedule import add_schedule

            return add_schedule
        case "estimate":
            from spmdtrain.cli.planning.estimate import add_estimate

            return add_estimate
        case "plan":
            from spmdtrain.cli.planning.plan import add_plan

            return add_plan
        case "compare":
            from spmdtrain.cli.planning.compare import add_compare

            return add_compare
        case "calibrate":
            from spmdtrain.cli.planning.calibrate import add_calibrate

            return add_calibrate
        case "doctor":
            from spmdtrain.cli.machine.doctor import add_doctor

            return add_doctor
        case "tune":
            from spmdtrain.cli.machine.tune import add_tune

            return add_tune
        case _:
            raise AssertionError(f"no command {name}")


def _add_data(commands) -> None:
    from spmdtrain.cli.data.inspect import add_inspect
    from spmdtrain.cli.data.prepare import add_prepare
    from spmdtrain.cli.data.reference import add_reference
    from spmdtrain.cli.data.teach import add_teach

    data = _add_group(commands, "data", "make token files, and look at data")
    add_inspect(data)
    add_prepare(data)
    add_reference(data)
    add_teach(data)


def _add_tokenizer(commands) -> None:
    from spmdtrain.cli.data.train_tokenizer import add_train_tokenizer

    add_train_tokenizer(_add_group(commands, "tokenizer", "train a tokenizer"))


def _add_group(commands, name: str, text: str):
    """Adds a group of commands, such as `data`, and returns the object that takes its commands."""
    group = commands.add_parser(name, help=text)
    return group.add_subparsers(title="commands", required=True, metavar="COMMAND")
