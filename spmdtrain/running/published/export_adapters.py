"""Exports the adapters of a run alone, in the format of peft."""

import contextlib
from pathlib import Path

import numpy as np

from spmdtrain.checkpoints.restore import read_step, run_config
from spmdtrain.checkpoints.store import Checkpoints
from spmdtrain.config.given import as_flag, as_path, as_step
from spmdtrain.interop.peft import Values, write_adapters
from spmdtrain.interop.weights import in_words
from spmdtrain.interop.writer import refuse_full
from spmdtrain.running.published.export_run import target_of


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
    lines that say what was written. Raises ConfigError where the run has no adapters or no family
    has its layers, and what `export_run` raises.
    """
    run, out = as_path(run, "run"), as_path(out, "out")
    step, ema = as_step(step), as_flag(ema, "ema")
    refuse_full(out)
    target, _ = target_of(run, "float32")
    config = run_config(run)
    base = base or config.train.init_from
    reading = contextlib.closing(Checkpoints(run, None, keep=None))
    with reading as checkpoints:

        def read(at: int) -> Values:
            return _values(checkpoints, at, ema=ema, whole=config.finetune.kind == "dora")

        at, values = read_step(checkpoints, run, step, read)
    count = write_adapters(out, values, config, target.family, base)
    size = sum(path.stat().st_size for path in out.iterdir())
    return [
        f"step {at} of {run}{', averaged' if ema else ''}",
        f"{out}: {count} tensors, {in_words(size)}; base {base or 'not named'}",
    ]


def _values(checkpoints: Checkpoints, step: int, *, ema: bool, whole: bool) -> Values:
    """Returns the weights; those that have adapters only by their shapes, unless `whole`."""
    if ema:
        checkpoints.averaged(step)  # raises if there is none
    shapes = checkpoints.weight_shapes(step)
    adapted = {path for path in shapes if any(each.startswith(f"{path}.") for each in shapes)}
    return {
        path: np.broadcast_to(np.float32(0), shape)
        if path in adapted and not whole
        else checkpoints.read_weight(step, path, ema=ema)
        for path, shape in shapes.items()
    }
