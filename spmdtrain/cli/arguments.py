"""Makes the parser of the command line, and the arguments of the commands on runs."""

import argparse
import re
from typing import Any

from spmdtrain.cli import doctor, launching, running
from spmdtrain.cli.data import add_data, add_tokenizer
from spmdtrain.cli.machine.arguments import add_tune
from spmdtrain.cli.planning.calibrate import add_calibrate
from spmdtrain.cli.planning.estimate import add_estimate
from spmdtrain.cli.planning.plan import add_plan
from spmdtrain.cli.planning.schedule import add_schedule
from spmdtrain.cli.prompts import TALK
from spmdtrain.cli.published.arguments import add_export, add_import
from spmdtrain.cli.shared_arguments import (
    add_config,
    add_devices,
    add_ema,
    add_make,
    add_set,
    add_step,
    positive_int,
    positive_seconds,
    seed_number,
    typed,
    whole,
)
from spmdtrain.config import ConfigError
from spmdtrain.config.load import settings_called
from spmdtrain.config.near import did_you_mean
from spmdtrain.launch.patience import STEP_SECONDS

# Commands that users of other trainers look for.
NOT_YET = {
    "report": "a report of a run",
    "diff": "comparing two runs",
}


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises our error: a usage error ends like a config error."""

    def error(self, message: str):
        raise ConfigError(message + self._meant(message), fix=f"{self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parses as argparse does, but lets a command itself report an unknown argument.

        It knows its own options; argparse would leave this to the parser of all commands.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _meant(self, message: str) -> str:
        """Suggests a meaning for the first word that argparse does not know."""
        if unknown := re.match(r"unrecognized arguments: (.*)", message, re.S):
            words = [word.partition("=")[0] for word in unknown[1].split()]
            flags = [word for word in words if word.startswith("-")]
            keys = settings_called((flags or words)[0])
            if keys and "--set" in self._option_string_actions:
                return f", did you mean --set {' or --set '.join(f'{key}=...' for key in keys)}?"
            if flags:
                return did_you_mean(flags[0], self._option_string_actions)
        if unknown := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message, re.S):
            if unknown[1] in NOT_YET:
                return f"; {NOT_YET[unknown[1]]} does not exist yet"
            commands = [
                name for action in self._actions if action.choices for name in action.choices
            ]
            return did_you_mean(unknown[1], commands)
        return ""


class _Version(argparse.Action):
    """Prints the version, which is looked up only when asked for."""

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
    _add_train(commands)
    _add_launch(commands)
    add_import(commands)
    _add_show(commands)
    _add_sample(commands)
    _add_eval(commands)
    add_export(commands)
    add_data(commands)
    add_tokenizer(commands)
    add_schedule(commands)
    add_estimate(commands)
    add_plan(commands)
    add_calibrate(commands)
    _add_doctor(commands)
    add_tune(commands)
    return parser


def _add_train(commands) -> None:
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
    train.set_defaults(command=running.train)


def _add_launch(commands) -> None:
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
        type=positive_seconds,
        default=STEP_SECONDS,
        metavar="S",
        help="seconds, or 5 times the longest step so far, after which a step counts as a hang "
        "(default: %(default)s)",
    )
    launch.add_argument("--report", metavar="FILE", help="write an account of the time, as JSON")
    launch.add_argument(
        "command_line",
        nargs=argparse.REMAINDER,
        metavar="train ...",
        help="the run, with the arguments it has without launch",
    )
    launch.set_defaults(command=launching.launch, make_parser=make_parser)


def _add_show(commands) -> None:
    show = commands.add_parser(
        "show", help="print the resolved config, the mesh and every parameter; nothing is allocated"
    )
    add_config(show)
    show.add_argument(
        "--svg", metavar="FILE", help="write a picture: the mesh, and which devices hold what"
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    add_devices(show)
    show.set_defaults(command=running.show)


def _add_sample(commands) -> None:
    sample = commands.add_parser("sample", help="generate text with a trained run")
    sample.add_argument("run", metavar="RUN", help="run directory")
    add_make(sample)
    add_ema(sample)
    add_step(sample)
    sample.add_argument(
        "--prompt",
        type=typed,
        help=r"text to continue; \n is a line break, \\n a backslash and an n "
        "(default: a line break)",
    )
    sample.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt per line, generated as one batch; "
        "a line of a .jsonl is a text, or an object with prompt or messages",
    )
    sample.add_argument(
        "--chat",
        nargs="?",
        const=TALK,
        type=typed,
        metavar="TEXT",
        help="ask a run that was trained on conversations, in its template; print the answer; "
        "without TEXT, hold a conversation: a question on each line until the input ends",
    )
    sample.add_argument(
        "--parse-special",
        action="store_true",
        help="read a special token spelled in a prompt as that token (default: as text)",
    )
    sample.add_argument(
        "--length",
        type=positive_int,
        help="tokens to add (default: as many as the model has positions for, at most 200)",
    )
    sample.add_argument(
        "--stop",
        action="append",
        type=typed,
        default=[],
        metavar="TEXT",
        help="end before this text; end-of-text: before the token that ends a document; "
        "may be repeated",
    )
    sample.add_argument(
        "--json", action="store_true", help='print JSON: {"prompt", "text"} per line'
    )
    sample.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0: always the likeliest token (default: %(default)s)",
    )
    sample.add_argument("--top-k", type=whole, help="choose only among the k likeliest tokens")
    sample.add_argument(
        "--top-p",
        type=float,
        help="choose only among the likeliest tokens that together reach probability p",
    )
    sample.add_argument(
        "--seed",
        type=seed_number,
        default=0,
        help="another seed, another text",
    )
    add_set(
        sample,
        "e.g. mesh.tensor=2 (default: one device); only mesh.*, rules.* and model.attention",
    )
    add_devices(sample)
    sample.set_defaults(command=running.sample)


def _add_eval(commands) -> None:
    evaluate = commands.add_parser(
        "eval", help="measure loss, perplexity and bits per byte of a trained run on any text"
    )
    evaluate.add_argument("run", metavar="RUN", help="run directory")
    evaluate.add_argument(
        "paths",
        nargs="*",
        metavar="FILE",
        help="texts or token files (default: the validation data of the run)",
    )
    add_step(evaluate)
    evaluate.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="of the text in JSON lines and tables (default: text)",
    )
    evaluate.add_argument(
        "--tasks",
        metavar="A,B",
        help="run tasks of lm-evaluation-harness instead of a loss; needs the package lm-eval",
    )
    evaluate.add_argument(
        "--limit", type=positive_int, metavar="N", help="examples per task (default: all)"
    )
    add_make(evaluate)
    add_ema(evaluate)
    add_set(evaluate, "e.g. mesh.data=8 (default: one device) or eval.batches=4")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    add_devices(evaluate)
    evaluate.set_defaults(command=running.evaluate)


def _add_doctor(commands) -> None:
    examine = commands.add_parser(
        "doctor",
        help="examine devices, versions, libraries and flags; say how to fix what is wrong",
    )
    examine.add_argument(
        "--measure",
        action="store_true",
        help="measure matmuls, memory, links and the disk, and name what is slow",
    )
    examine.add_argument("--json", action="store_true", help="print JSON")
    add_devices(examine)
    examine.set_defaults(command=doctor.doctor)
