"""`spmdtrain import`: makes a run of a published model."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.shared_arguments import add_devices, add_set, positive_int
from spmdtrain.config import DONE, ConfigError
from spmdtrain.processes.scheduler import is_first


def add_import(commands) -> None:
    """Adds the command `import` and its arguments."""
    parser = commands.add_parser(
        "import", help="turn a Hugging Face model into a run: settings, tokenizer, weights"
    )
    parser.add_argument(
        "folder", metavar="DIR", help="the folder with config.json and *.safetensors"
    )
    parser.add_argument("--out", metavar="RUN", help="run directory to create")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings of the model as TOML, and exit",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the logits with those of transformers, which must be installed",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the weights in the run (default: as in the files)",
    )
    parser.add_argument(
        "--untie",
        action="store_true",
        help="give a separate head to a model that shares its embedding",
    )
    parser.add_argument(
        "--max-length", type=positive_int, metavar="N", help="longest sequence of the run"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAMES",
        help="tensors to leave out; * stands for any part of a name; may be repeated",
    )
    add_set(parser, "override a setting of the model, or mesh.*; may be repeated")
    add_devices(parser)
    parser.set_defaults(command=run_import)


def run_import(parsed: argparse.Namespace) -> int:
    """Imports a published model, or prints its settings."""
    overrides = _overrides(parsed)
    if parsed.check:
        _require_comparable(parsed)
    if parsed.print_config:
        from spmdtrain.config.published.toml import model_toml

        print(model_toml(parsed.folder, overrides))
        return DONE
    if parsed.out is None:
        raise ConfigError("import makes a run directory: --out says which", fix="--out RUN")
    start_jax(parsed, keeps_memory=True)
    from spmdtrain.running.published.import_model import import_model

    check = None
    if parsed.check:
        from spmdtrain.cli.published.check import check_logits

        check = partial(check_logits, parsed.folder)
    imported = import_model(
        parsed.folder, parsed.out, overrides=overrides, ignored=parsed.ignore, check=check
    )
    if is_first(parsed.process):
        print(*imported.lines, sep="\n")
    return DONE


def _require_comparable(parsed: argparse.Namespace) -> None:
    """Raises ConfigError, before anything is read, if the logits cannot be compared."""
    from spmdtrain.cli.published.check import require_transformers

    if parsed.print_config:
        what = "--check compares the weights of a model, and --print-config reads none"
        raise ConfigError(what, fix="one of them at a time")
    require_transformers()


def _overrides(parsed: argparse.Namespace) -> Sequence[str]:
    """Returns the settings that options stand for, then those of --set, which win."""
    settings = []
    if parsed.untie:
        from spmdtrain.config.published.read_config import refuse_untied

        refuse_untied(Path(parsed.folder))
        settings.append("model.tied=false")
    if parsed.max_length is not None:
        settings.append(f"model.max_length={parsed.max_length}")
    if parsed.dtype is not None:
        settings += [f"precision.params={parsed.dtype}", f"precision.compute={parsed.dtype}"]
    return [*settings, *parsed.set]
