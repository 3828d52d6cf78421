"""Arguments that several commands share, and the types of their values."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

from pallas_kernels.gpus import GPUS
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.settable import ALL

WHOLE = re.compile("[0-9]{1,18}")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the config file and `--set`."""
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, like those in configs/")
    add_set(parser, "override one setting; may be repeated")


def add_documents(parser: argparse.ArgumentParser) -> None:
    """Adds the files of documents, and the options for reading them."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="files or globs: text (a document each), .jsonl, .parquet or .arrow, "
        "text and .jsonl also as .gz and .zst; or the folder of a saved dataset",
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="field of the document in .jsonl and tables (default: text; for chats: messages)",
    )
    parser.add_argument(
        "--split-on",
        type=unescaped,
        metavar="TEXT",
        help=r"separator of the documents in a text file, e.g. '<|endoftext|>' or '\n\n\n'",
    )


def add_set(parser: argparse.ArgumentParser, text: str, settable: Sequence[str] = ALL) -> None:
    """Adds `--set KEY=VALUE`, for the settings in `settable`."""
    parser.set_defaults(settable=settable)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def add_make(parser: argparse.ArgumentParser) -> None:
    """Adds `--make`, which names a custom model."""
    parser.add_argument(
        "--make",
        metavar="FILE.py:CLASS",
        help="the model of a run trained with model.make; runs its code",
    )


def add_own(parser: argparse.ArgumentParser) -> None:
    """Adds `--own`, which names the code of a run's own parts."""
    parser.add_argument(
        "--own",
        action="append",
        default=[],
        metavar="FILE.py",
        help="a file or module that [own] of the run names; runs its code",
    )


def add_ema(parser: argparse.ArgumentParser) -> None:
    """Adds `--ema`, which selects the average of the weights."""
    parser.add_argument(
        "--ema",
        action="store_true",
        help="use the average of the weights, if the run was trained with optimizer.ema",
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds `--step`."""
    parser.add_argument(
        "--step",
        type=positive_int,
        metavar="N",
        help="step of the checkpoint (default: the newest that is not damaged)",
    )


def of_run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the four options of a trained run, as keywords of the functions that read one."""
    return {
        "step": parsed.step,
        "overrides": parsed.set,
        "make": parsed.make,
        "ema": parsed.ema,
    }


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Adds `--hardware`."""
    names = f"{', '.join(GPUS)} or a .toml file"
    parser.add_argument("--hardware", required=True, metavar="NAME", help=names)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Adds the number of simulated devices, and the processes that run together."""
    parser.add_argument(
        "--simulate-devices",
        type=positive_int,
        metavar="N",
        help="simulate N devices on the CPU",
    )
    add_processes(parser)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the processes that run together."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0, if several processes run one program",
    )
    parser.add_argument("--processes", type=whole, metavar="N", help="number of processes")
    parser.add_argument("--process", type=whole, metavar="I", help="number of this process, from 0")


# Types of values. argparse turns these errors into a refusal that names the argument.


def positive_int(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not WHOLE.fullmatch(text) or int(text) < 1:
        digits = "of at most 18 digits" if re.fullmatch("[0-9]+", text) else "of at least 1"
        digits = digits if text.strip("0") else "of at least 1"
        raise argparse.ArgumentTypeError(f"{text:.40} is not a whole number {digits}")
    return int(text)


def whole(text: str) -> int:
    """Reads a whole number; its range is checked later."""
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text:.40} is not a whole number of at most 9 digits")
    return int(text)


def duration(text: str) -> float:
    """Reads a time in any unit: a number from 0 to 1e12."""
    try:
        time = float(text)
    except ValueError:
        time = -1.0
    if not 0 <= time <= 1e12:  # also refuses nan; the bound keeps sums finite
        raise argparse.ArgumentTypeError(f"{text:.40} is not a time: a number from 0 to 1e12")
    return time


ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def text(argument: str) -> str:
    """Reads typed text as UTF-8, regardless of the terminal's locale."""
    try:
        typed = os.fsencode(argument)
    except UnicodeEncodeError:  # passed by a program, not typed at a terminal
        typed = argument.encode(errors="surrogateescape")
    try:
        return typed.decode()
    except UnicodeDecodeError:
        pass
    if re.search("[\ud800-\udfff]", argument):
        raise argparse.ArgumentTypeError(f"{argument!r:.40} is not UTF-8")
    return argument  # Python has decoded it with the locale's own encoding


def unescaped(argument: str) -> str:
    r"""Reads a text of at least one character, as `typed` does."""
    if not argument:
        raise argparse.ArgumentTypeError("it is empty")
    return typed(argument)


def typed(argument: str) -> str:
    r"""Reads a text, with \n, \t and \\ in it as a line break, a tab and a backslash."""
    return re.sub(r"\\([nt\\])", lambda match: ESCAPES[match[1]], text(argument))


def refuse_together(parsed: argparse.Namespace, first: str, *others: str) -> None:
    """Refuses an option together with others that it would silently ignore."""
    if getattr(parsed, first) in (None, False):
        return
    for other in others:
        if getattr(parsed, other) not in (None, False):
            raise ConfigError(
                f"--{first} and --{other} cannot go together", fix="one of them at a time"
            )
