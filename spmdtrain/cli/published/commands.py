"""Runs `import` and `export`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from spmdtrain.cli.devices import start_jax, without_devices
from spmdtrain.config import DONE, ConfigError
from spmdtrain.processes.scheduler import is_first


def import_(parsed: argparse.Namespace) -> int:
    """Imports a published model, or prints its settings."""
    overrides = _overrides(parsed)
    if parsed.print_config:
        from spmdtrain.config.published.toml import model_toml

        print(model_toml(parsed.folder, overrides))
        return DONE
    if parsed.out is None:
        raise ConfigError("import makes a run directory: --out says which", fix="--out RUN")
    start_jax(parsed)
    from spmdtrain.running.published.import_model import import_model

    imported = import_model(parsed.folder, parsed.out, overrides=overrides, ignored=parsed.ignore)
    if is_first(parsed.process):
        print(*imported.lines, sep="\n")
    if parsed.check:
        from spmdtrain.cli.published.check import check_logits

        print(check_logits(parsed.folder, imported.setup, imported.params))
    return DONE


def _overrides(parsed: argparse.Namespace) -> Sequence[str]:
    """Returns the settings that options stand for, and those of --set, which win."""
    found = []
    if parsed.untie:
        from spmdtrain.config.published.reading import refuse_untied

        refuse_untied(Path(parsed.folder))
        found.append("model.tied=false")
    if parsed.max_length is not None:
        found.append(f"model.max_length={parsed.max_length}")
    if parsed.dtype is not None:
        found += [f"precision.params={parsed.dtype}", f"precision.compute={parsed.dtype}"]
    return [*found, *parsed.set]


def export(parsed: argparse.Namespace) -> int:
    """Writes a run as a directory of Hugging Face, or its adapters as one of peft."""
    without_devices()
    if parsed.to == "peft":
        print(*_export_adapters(parsed), sep="\n")
        return DONE
    if parsed.base is not None:
        raise ConfigError(f"--base {parsed.base} is for --to peft, not for --to {parsed.to}")
    from spmdtrain.interop.writer import PART
    from spmdtrain.running.published.export_run import export_run

    lines = export_run(
        parsed.run,
        parsed.out,
        step=parsed.step,
        ema=parsed.ema,
        dtype=parsed.dtype,
        part=parsed.part or PART,
    )
    print(*lines, sep="\n")
    return DONE


def _export_adapters(parsed: argparse.Namespace) -> list[str]:
    for option in ("dtype", "part"):
        if getattr(parsed, option) is not None:
            what = f"--{option} {getattr(parsed, option)} is for --to hf: adapters are float32"
            raise ConfigError(what, fix=f"no --{option}")
    from spmdtrain.running.published.export_adapters import export_adapters

    return export_adapters(
        parsed.run, parsed.out, step=parsed.step, ema=parsed.ema, base=parsed.base
    )
