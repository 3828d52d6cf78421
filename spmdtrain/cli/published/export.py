"""`spmdtrain export`: writes a trained run in the formats that other programs load."""

import argparse
import re

from spmdtrain.cli.devices import join_without_devices, without_devices
from spmdtrain.cli.shared_arguments import add_ema, add_processes, whole
from spmdtrain.config import DONE, ConfigError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_export(commands) -> None:
    """Adds the command `export` and its arguments."""
    parser = commands.add_parser(
        "export", help="write a trained run as a directory for transformers, vLLM and llama.cpp"
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--to",
        choices=("hf", "peft"),
        required=True,
        help="hf: Hugging Face, with adapters merged; peft: the adapters alone",
    )
    parser.add_argument("out", metavar="DIR", help="folder to create")
    parser.add_argument(
        "--step",
        type=whole,
        metavar="N",
        help="step of the checkpoint (default: the newest that is not damaged)",
    )
    parser.add_argument(
        "--average",
        type=whole,
        nargs="+",
        default=[],
        metavar="N",
        help="hf: the mean of the weights after each of these steps",
    )
    add_ema(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the files (default: as imported, or bfloat16; peft: float32)",
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="hf: the published folder whose frozen weights the adapters are merged with "
        "(default: those that the run holds); peft: the name of the model that the adapters "
        "belong to (default: train.init_from of the run)",
    )
    parser.add_argument(
        "--with",
        dest="also",
        action="append",
        default=[],
        metavar="RUN",
        help="hf: also merge the adapters of another run with the same base; may be repeated",
    )
    parser.add_argument(
        "--part",
        type=_bytes,
        metavar="SIZE",
        help="largest file, e.g. 5GB or 500MB (default: the files of the import, or 5GB)",
    )
    add_processes(parser)
    parser.set_defaults(command=run_export)


def _bytes(text: str) -> int:
    """Reads a number of bytes with a unit of thousands."""
    matched = re.fullmatch(r"([0-9]{1,6})([KMGT]B)?", text.upper())
    if not matched or not int(matched[1]):
        raise argparse.ArgumentTypeError(f"{text:.40} is not a size such as 5GB or 500MB")
    return int(matched[1]) * UNITS[matched[2] or ""]


def run_export(parsed: argparse.Namespace) -> int:
    """Writes a run as a Hugging Face directory, or its adapters as a peft directory."""
    if parsed.to == "peft":
        without_devices()
        print(*_export_adapters(parsed), sep="\n")
        return DONE
    join_without_devices(parsed)
    from spmdtrain.running.published.export_run import export_run

    lines = export_run(
        parsed.run,
        parsed.out,
        step=parsed.step,
        ema=parsed.ema,
        dtype=parsed.dtype,
        part=parsed.part,
        base=parsed.base,
        also=parsed.also,
        average=parsed.average,
    )
    if not parsed.process:
        print(*lines, sep="\n")
    return DONE


def _export_adapters(parsed: argparse.Namespace) -> list[str]:
    if parsed.also:
        raise ConfigError(f"--with {parsed.also[0]} is for --to hf", fix="an export of each run")
    if parsed.average:
        raise ConfigError("--average is for --to hf", fix="--step N")
    if parsed.processes is not None:
        raise ConfigError(f"--processes {parsed.processes} is for --to hf", fix="one process")
    for option in ("dtype", "part"):
        if getattr(parsed, option) is not None:
            what = f"--{option} {getattr(parsed, option)} is for --to hf: adapters are float32"
            raise ConfigError(what, fix=f"no --{option}")
    from spmdtrain.running.published.export_adapters import export_adapters

    return export_adapters(
        parsed.run, parsed.out, step=parsed.step, ema=parsed.ema, base=parsed.base
    )
