"""Makes the parser of the command line: all commands, in the order of `--help`."""

import argparse
import re
from typing import Any

from spmdtrain.cli.data.inspect import add_inspect
from spmdtrain.cli.data.prepare import add_prepare
from spmdtrain.cli.data.reference import add_reference
from spmdtrain.cli.data.teach import add_teach
from spmdtrain.cli.data.train_tokenizer import add_train_tokenizer
from spmdtrain.cli.machine.doctor import add_doctor
from spmdtrain.cli.machine.tune import add_tune
from spmdtrain.cli.planning.calibrate import add_calibrate
from spmdtrain.cli.planning.compare import add_compare
from spmdtrain.cli.planning.estimate import add_estimate
from spmdtrain.cli.planning.plan import add_plan
from spmdtrain.cli.planning.schedule import add_schedule
from spmdtrain.cli.published.export import add_export
from spmdtrain.cli.published.import_ import add_import
from spmdtrain.cli.record.diff import add_diff
from spmdtrain.cli.record.explain import add_explain
from spmdtrain.cli.record.profile import add_profile
from spmdtrain.cli.record.replay import add_replay
from spmdtrain.cli.run.certify import add_certify
from spmdtrain.cli.run.coordcheck import add_coordcheck
from spmdtrain.cli.run.eval import add_eval
from spmdtrain.cli.run.launch import add_launch
from spmdtrain.cli.run.report import add_report
from spmdtrain.cli.run.sample import add_sample
from spmdtrain.cli.run.show import add_show
from spmdtrain.cli.run.train import add_train
from spmdtrain.config import ConfigError
from spmdtrain.config.load import settings_called
from spmdtrain.config.near import did_you_mean


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


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser. `parsed.command(parsed)` then runs the command and returns its code."""
    parser = _Parser(
        prog="spmdtrain",
        description="Train transformers on any mesh of devices from one SPMD program.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_train(commands)
    add_launch(commands, make_parser)
    add_import(commands)
    add_show(commands)
    add_report(commands)
    add_sample(commands)
    add_eval(commands)
    add_replay(commands)
    add_explain(commands)
    add_diff(commands)
    add_profile(commands)
    add_certify(commands)
    add_coordcheck(commands)
    add_export(commands)
    data = _add_group(commands, "data", "make token files, and look at data")
    add_inspect(data)
    add_prepare(data)
    add_reference(data)
    add_teach(data)
    tokenizer = _add_group(commands, "tokenizer", "train a tokenizer")
    add_train_tokenizer(tokenizer)
    add_schedule(commands)
    add_estimate(commands)
    add_plan(commands)
    add_compare(commands)
    add_calibrate(commands)
    add_doctor(commands)
    add_tune(commands)
    return parser


def _add_group(commands, name: str, text: str):
    """Adds a group of commands, such as `data`, and returns what its commands are added to."""
    group = commands.add_parser(name, help=text)
    return group.add_subparsers(title="commands", required=True, metavar="COMMAND")
