"""Exports a run as a Hugging Face directory, which transformers, vLLM and llama.cpp load.

Its files are written a tensor at a time, from a checkpoint of any mesh, without devices. A process
holds two layers of a parameter, one that is written while the next is read, and several processes
each write files of their own.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.checkpoints.layers import Layers, check_average
from spmdtrain.checkpoints.restore import read_step, run_config
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config.arguments import as_flag, as_path, as_step, as_whole
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.schema import FinetuneConfig
from spmdtrain.interop.pieces import Written
from spmdtrain.interop.published_weights import in_words
from spmdtrain.interop.target import Target
from spmdtrain.interop.writer import PART, TensorWriter, new_folder, numpy_dtype, refuse_full
from spmdtrain.models.abstract import build_model
from spmdtrain.processes.processes import this_process, together
from spmdtrain.running.published.around import write_around
from spmdtrain.running.published.as_target import target_of
from spmdtrain.running.published.merged_layers import (
    MeanOfSteps,
    MergedLayers,
    OfRun,
    check_merge,
    weights_of_base,
)
from spmdtrain.running.same_tokenizer import check_same, tokenizer_of

Split = Callable[[np.ndarray], Sequence[Written]]  # a layer of a parameter -> the tensors of a file


@dataclass(frozen=True)
class ExportOfRun:
    """The request for an export: of `run`, with the adapters of `others`, as the directory
    `out`.
    """

    run: Path
    out: Path
    target: Target
    saved: Mapping[str, Any]
    others: Mapping[Path, FinetuneConfig]
    ema: bool
    part: int | None
    base: str | Path | None
    average: Sequence[int]


def export_run(  # noqa: PLR0913 - all that a directory is made of
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    ema: bool = False,
    dtype: str | None = None,
    part: int | None = None,
    base: str | Path | None = None,
    also: Sequence[str | Path] = (),
    average: Sequence[int] = (),
) -> list[str]:
    """Writes the weights of `run` after `step` steps (default: the newest) as the directory `out`.

    With `ema` they are the averages that a run with `optimizer.ema` keeps. `dtype` is float32,
    bfloat16 or float16; by default that of the import, or else bfloat16. Tensors that were imported
    in float32 among others stay so. A file has at most `part` bytes; by default the files are those
    of the import, or have 5 GB. Adapters are merged with the frozen weights of the published folder
    `base` (default: those that the run holds), and so are the adapters of the runs `also`, which
    must have the same base. With `average` the weights are the mean of those after each of these
    steps.

    All processes call it. Returns lines that say what was written. Raises ConfigError if no family
    computes what the model does, CheckpointError if there is no such checkpoint or the base
    differs, and StorageError if `out` is not empty or cannot be written.
    """
    run, out = as_path(run, "run"), as_path(out, "out")
    step, ema = as_step(step), as_flag(ema, "ema")
    average = [as_whole(item, "average", 0) for item in average]
    check_average(run, step, average)
    part = None if part is None else as_whole(part, "part", 1)
    refuse_full(out)
    target, saved = target_of(run, dtype)
    others = {as_path(item, "also"): run_config(item).finetune for item in also}
    check_merge({run: target.finetune, **others}, base)
    for other in others:
        fix = "adapters that learned the tokenizer of that run"
        check_same(f"--with {other}", other, tokenizer_of(run), f"{run}", fix)
    export = ExportOfRun(run, out, target, saved, others, ema, part, base, average)
    with contextlib.closing(SavedSteps(run)) as checkpoints:
        step = max(average) if average else step
        at, lines = read_step(checkpoints, run, step, lambda at: _write(checkpoints, at, export))
    averaged = ", averaged" if ema else ""
    which = f"step {at}" if not average else f"the mean of steps {', '.join(map(str, average))}"
    return [f"{which} of {run}{averaged}, written as {target.dtype}", *lines]


def _write(checkpoints: SavedSteps, step: int, export: ExportOfRun) -> list[str]:
    target = export.target
    with contextlib.ExitStack() as held:
        source = _weights(checkpoints, step, export, held)
        shapes = target.shapes(source.shapes)
        process, processes = this_process()
        folder = held.enter_context(new_folder(export.out, process=process))
        writer = TensorWriter(
            folder,
            shapes,
            target.dtypes(source.shapes),
            files=None if export.part else target.files(shapes),
            part=export.part or PART,
            process=process,
            processes=processes,
        )
        with together():
            if process == 0:
                writer.begin()
        with together():
            _write_mine(source, target, writer, process, processes)
            writer.finish()
        source.verify()
        remark = ""
        with together():
            if process == 0:
                remark = write_around(folder, target, export.saved, export.run)
    remark = f"{source.merged} arrays of adapters merged; {remark}" if source.merged else remark
    files = f"{len(writer.files)} file{'s' if len(writer.files) > 1 else ''}"
    size = f"{in_words(writer.bytes)} in {files}"
    return [
        f"{export.out}: {target.family}, {len(shapes)} tensors, {size}; "
        f"config.json for transformers 4 and 5; {remark}"
    ]


def _write_mine(
    source: MergedLayers | MeanOfSteps,
    target: Target,
    writer: TensorWriter,
    process: int,
    processes: int,
) -> None:
    """Writes the tensors of this process's files, a layer while the next one is read."""
    mine = writer.names_of(process, processes)
    dtypes = target.dtypes(source.shapes)

    def write(value: np.ndarray, split: Split, names: Sequence[str]) -> None:
        of_names = {dtypes[name] for name in names}
        if len(of_names) == 1:  # rounded before it is split, which is then faster
            value = value.astype(numpy_dtype(of_names.pop()), copy=False)
        tensors = split(value)
        for name, tensor in zip(names, tensors, strict=True):
            if name in mine:
                writer.write(name, tensor)

    with ThreadPoolExecutor(1) as thread:
        written: Future[None] | None = None
        for path, shape in source.shapes.items():
            entry, mapped, layers = target.mapped(path, shape)
            for layer in layers:
                names = entry.of_layer(layer)
                if mine.isdisjoint(names):
                    continue
                # A layer whose tensors lie in the files of two processes is counted by only one of
                # them.
                value = source.read(path, layer, counts=names[0] in mine)
                if written:
                    written.result()
                written = thread.submit(write, value, mapped.write, names)
        if written:
            written.result()


def _weights(
    checkpoints: SavedSteps, step: int, export: ExportOfRun, held: contextlib.ExitStack
) -> MergedLayers | MeanOfSteps:
    """Returns the source of an export's weights: the checkpoints of all its runs, opened."""
    if not export.average:
        return _merged_layers(checkpoints, step, export, held)
    return MeanOfSteps([_merged_layers(checkpoints, at, export, held) for at in export.average])


def _merged_layers(
    checkpoints: SavedSteps, step: int, export: ExportOfRun, held: contextlib.ExitStack
) -> MergedLayers:
    """Returns the weights after one step, with all adapters merged."""
    target = export.target
    first = OfRun(
        export.run, Layers(checkpoints, step, ema=export.ema), target.finetune, target.model
    )
    others = []
    for run, finetune in export.others.items():
        opened = held.enter_context(contextlib.closing(SavedSteps(run)))
        newest = opened.newest()
        if newest is None:
            raise CheckpointError(f"{run} holds no checkpoint", fix="training it first")
        others.append(OfRun(run, Layers(opened, newest, ema=export.ema), finetune, target.model))
    if export.base is None:
        return MergedLayers(first, others, first.own_shapes())
    wide = target.finetune.model_copy(update={"kind": "full", "base": "float"})
    config = from_resolved(dict(export.saved))
    plain = build_model(config.model_copy(update={"finetune": wide}))
    shapes = {path: tuple(parameter.shape) for path, parameter in plain.parameters.items()}
    of_layer = {
        path: shape[1:] if plain.in_stack(path) else shape for path, shape in shapes.items()
    }
    base = weights_of_base(export.base, target.family, config.model, of_layer)
    return MergedLayers(first, others, shapes, base)
