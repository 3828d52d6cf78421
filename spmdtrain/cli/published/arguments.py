"""The arguments of `import` and `export`."""

import argparse
import re

from spmdtrain.cli.published import commands
from spmdtrain.cli.shared_arguments import add_devices, add_ema, add_set, positive_int, whole

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_import(parser_of_all) -> None:
    """Adds `import`."""
    parser = parser_of_all.add_parser(
        "import", help="a published model of Hugging Face as a run: settings, tokenizer, weights"
    )
    parser.add_argument(
        "folder", metavar="DIR", help="the folder with config.json and *.safetensors"
    )
    parser.add_argument("--out", metavar="RUN", help="run directory that is made")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings of the model as TOML, and end",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compares the logits with those of transformers, where that is installed",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the weights in the run (default: as in the files)",
    )
    parser.add_argument(
        "--untie",
        action="store_true",
        help="gives a separate head to a model that shares the embedding",
    )
    parser.add_argument(
        "--max-length", type=positive_int, metavar="N", help="longest sequence of the run"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAMES",
        help="tensors that are left out, * for any part of a name; may be repeated",
    )
    add_set(parser, "a setting on top of the model's, or mesh.*; may be repeated")
    add_devices(parser)
    parser.set_defaults(command=commands.import_)


def add_export(parser_of_all) -> None:
    """Adds `export`."""
    parser = parser_of_all.add_parser(
        "export", help="a trained run as a directory that transformers, vLLM and llama.cpp load"
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--to",
        choices=("hf", "peft"),
        required=True,
        help="hf: Hugging Face, with adapters merged; peft: the adapters alone",
    )
    parser.add_argument("out", metavar="DIR", help="folder that is made")
    parser.add_argument(
        "--step",
        type=whole,
        metavar="N",
        help="of the checkpoint (default: the newest that is not damaged)",
    )
    add_ema(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the files (default: as imported, or bfloat16; peft: float32)",
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="peft: the model that the adapters are of (default: train.init_from of the run)",
    )
    parser.add_argument(
        "--part",
        type=_bytes,
        metavar="SIZE",
        help="of a file at most, 5GB or 500MB say (default: 5GB)",
    )
    parser.set_defaults(command=commands.export)


def _bytes(text: str) -> int:
    """Reads a number of bytes with a unit of thousands."""
    found = re.fullmatch(r"([0-9]{1,6})([KMGT]B)?", text.upper())
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text:.40} is not a size such as 5GB or 500MB")
    return int(found[1]) * UNITS[found[2] or ""]
