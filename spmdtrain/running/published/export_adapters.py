"""Exports only the adapters of a run, in the format of peft."""

import contextlib
from pathlib import Path

import numpy as np

from spmdtrain.checkpoints.restore import read_step, run_config
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config.arguments import as_flag, as_path, as_step
from spmdtrain.config.published.read_config import model_type_of
from spmdtrain.config.schema import RunConfig
from spmdtrain.interop.companion_files import original_folder
from spmdtrain.interop.peft.adapter_config import WITH_TOWER
from spmdtrain.interop.peft.adapter_files import write_adapters
from spmdtrain.interop.peft.linear_layers import Values
from spmdtrain.interop.published_weights import in_words
from spmdtrain.interop.writer import refuse_full
from spmdtrain.models.abstract import build_model
from spmdtrain.running.published.as_target import target_of


def export_adapters(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    ema: bool = False,
    base: str | None = None,
) -> list[str]:
    """Writes the adapters of `run` after `step` steps (default: the newest) as the directory `out`.

    With `ema` they are the averages that a run with `optimizer.ema` keeps. `base` is the name of
    the model that they adapt, which peft loads; default: `train.init_from` of the run. Returns
    lines that say what was written. Raises ConfigError if the run has no adapters or no family has
    its layers, and what `export_run` raises.
    """
    run, out = as_path(run, "run"), as_path(out, "out")
    step, ema = as_step(step), as_flag(ema, "ema")
    refuse_full(out)
    target, _ = target_of(run, "float32")
    config = run_config(run)
    base = base or config.train.init_from
    reading = contextlib.closing(SavedSteps(run))
    with reading as checkpoints:

        def read(at: int) -> Values:
            return _values(checkpoints, at, config, ema=ema)

        at, values = read_step(checkpoints, run, step, read)
    has_tower = type_of_base(run, base) in WITH_TOWER
    count = write_adapters(out, values, config, target.family, base, has_tower=has_tower)
    size = sum(path.stat().st_size for path in out.iterdir())
    return [
        f"step {at} of {run}{', averaged' if ema else ''}",
        f"{out}: {count} tensors, {in_words(size)}; base {base or 'not named'}",
    ]


def type_of_base(run: Path, base: str | None) -> str | None:
    """Returns the model_type of the base, or of the run's import if `base` is no folder here."""
    of_base = model_type_of(Path(base)) if base else None
    original = original_folder(run)
    return of_base or (model_type_of(original) if original else None)


def _values(checkpoints: SavedSteps, step: int, config: RunConfig, *, ema: bool) -> Values:
    """Returns the weights; of adapted weights only the adapters."""
    if ema:
        checkpoints.averaged(step)  # raises if there is none
    saved = checkpoints.weight_shapes(step)
    wide = config.finetune.model_copy(update={"base": "float"})
    model = build_model(config.model_copy(update={"finetune": wide}))
    values = {}
    for path, parameter in model.parameters.items():
        is_adapted = any(name.startswith(f"{path}.") for name in model.parameters)
        if is_adapted and (path not in saved or config.finetune.kind != "dora"):
            values[path] = np.broadcast_to(np.float32(0), parameter.shape)
        else:
            values[path] = checkpoints.read_weight(step, path, ema=ema)
    return values
