"""Exports a run as a directory of Hugging Face: what transformers, vLLM and llama.cpp load.

Its files are written a tensor at a time, from a checkpoint of any mesh, without devices.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.checkpoints.restore import read_document, read_step, refuse_own_code
from spmdtrain.checkpoints.store import Checkpoints
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.given import as_flag, as_path, as_step, as_whole
from spmdtrain.config.load import from_resolved
from spmdtrain.config.published.reading import read_published
from spmdtrain.config.published.writing import write_config
from spmdtrain.data.chats.template_folder import TEMPLATE, folder_template, jinja_text
from spmdtrain.data.tokenizers.tokenizer import from_spec
from spmdtrain.interop.directory import CONFIG, TOKENIZER, copy_files, files_to_keep, kept_in
from spmdtrain.interop.target import Target
from spmdtrain.interop.weights import in_words
from spmdtrain.interop.writer import (
    NAMES,
    PART,
    TensorWriter,
    new_folder,
    numpy_dtype,
    refuse_full,
    writing,
)
from spmdtrain.models.adapters.by_path import check_merges, merged


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    ema: bool = False,
    dtype: str | None = None,
    part: int = PART,
) -> list[str]:
    """Writes the weights of `run` after `step` steps (default: the newest) as the directory `out`.

    With `ema` they are the averages that a run with `optimizer.ema` keeps. `dtype` is float32,
    bfloat16 or float16; by default that of the import, or else bfloat16. A file has at most `part`
    bytes. Returns lines that say what was written. Raises ConfigError where no family computes what
    the model does, CheckpointError where there is no such checkpoint, and StorageError where `out`
    is not empty or cannot be written.
    """
    run, out = as_path(run, "run"), as_path(out, "out")
    step, ema = as_step(step), as_flag(ema, "ema")
    part = as_whole(part, "part", 1)
    refuse_full(out)
    target, saved = target_of(run, dtype)
    check_merges(target.finetune)
    reading = contextlib.closing(Checkpoints(run, None, keep=None))
    with reading as checkpoints:
        at, lines = read_step(
            checkpoints,
            run,
            step,
            lambda at: _write(checkpoints, at, target, saved, run, out, ema, part),
        )
    averaged = ", averaged" if ema else ""
    return [f"step {at} of {run}{averaged}, written as {target.dtype}", *lines]


def target_of(run: Path, dtype: str | None) -> tuple[Target, dict[str, Any]]:
    """Returns what a run is written as, and its config.json, or ConfigError."""
    saved, named = read_document(run)
    refuse_own_code(run, saved, named)
    config = from_resolved(saved)
    if config.model.make or saved.get("model_code", {}).get("make"):
        raise ConfigError(f"{run} has a custom model, which belongs to no family")
    model = config.model.model_copy(update={"max_length": config.max_length})
    kept = kept_in(run)
    base = read_published(kept) if kept else None
    chosen = dtype or (base and base.dtype) or "bfloat16"
    if chosen not in NAMES:
        raise ConfigError(f"--dtype {chosen!r:.40} is none of {', '.join(NAMES)}")
    end = saved.get("end_of_text")
    # Null for those that do not exist: transformers would fill in its own ids.
    tokens = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    family, keys = write_config(model, base, dtype=chosen, tokens=tokens, run=run)
    return Target(model, family, keys, chosen, config.finetune), saved


def _write(  # noqa: PLR0913 - all that a directory is made of
    checkpoints: Checkpoints,
    step: int,
    target: Target,
    saved: Mapping[str, Any],
    run: Path,
    out: Path,
    ema: bool,
    part: int,
) -> list[str]:
    there = checkpoints.weight_shapes(step)
    adapters = {path: [one for one in there if one.startswith(f"{path}.")] for path in there}
    of_adapters = {one for each in adapters.values() for one in each}
    ours = {path: shape for path, shape in there.items() if path not in of_adapters}
    if ema:
        checkpoints.averaged(step)  # raises if there is none
    with new_folder(out) as folder:
        shapes = target.shapes(ours)
        writer = TensorWriter(folder, shapes, target.dtype, part)
        wanted = numpy_dtype(target.dtype)
        for path, shape in ours.items():
            entry, mapped, layers = target.mapped(path, shape)
            parts = [path, *adapters[path]]
            values = {one: checkpoints.read_weight(step, one, ema=ema) for one in parts}
            value = merged(values, target.finetune)[path]
            del values
            for layer in layers:
                one = (value if layer is None else value[layer]).astype(wanted)
                for name, tensor in zip(entry.of_layer(layer), mapped.write(one), strict=True):
                    writer.write(name, tensor)
            del value
        writer.finish()
        said = _write_around(folder, target, saved, run)
    said = f"{len(of_adapters)} arrays of adapters merged; {said}" if of_adapters else said
    files = f"{len(writer.files)} file{'s' if len(writer.files) > 1 else ''}"
    return [
        f"{out}: {target.family}, {len(shapes)} tensors, {in_words(writer.bytes)} in {files}; "
        f"config.json for transformers 4 and 5; {said}"
    ]


def _write_around(folder: Path, target: Target, saved: Mapping[str, Any], run: Path) -> str:
    """Writes config.json, the tokenizer and the template of conversations.

    Returns what is to be said of that.
    """
    with writing(folder):
        text = json.dumps(target.keys, indent=2, ensure_ascii=False)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    said = _write_tokenizer(folder, saved, run)
    template = saved.get("template")
    published = folder_template(folder, {})
    if isinstance(template, dict) and not (published and published.text == template["jinja"]):
        with writing(folder):
            (folder / TEMPLATE).write_text(jinja_text(template).text, encoding="utf-8")
    return said


def _write_tokenizer(folder: Path, saved: Mapping[str, Any], run: Path) -> str:
    """Writes the files of the tokenizer; returns what is to be said of that."""
    spec = saved.get("tokenizer")
    kept = kept_in(run)
    if kept and (spec is None or _is_same(kept / TOKENIZER, spec)):
        copy_files(files_to_keep(kept), folder)
        return "tokenizer as imported" if (kept / TOKENIZER).is_file() else "no tokenizer"
    if not spec or spec.get("kind") != "huggingface":
        return "no tokenizer: the run's is none of Hugging Face"
    from_spec(spec)  # raises if it is damaged
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    end = saved.get("end_of_text")
    if end is not None and (token := from_spec(spec).decode([end])):
        described["eos_token"] = token
    with writing(folder):
        (folder / TOKENIZER).write_text(spec["json"], encoding="utf-8")
        text = json.dumps(described, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return "tokenizer of the run"


def _is_same(path: Path, spec: Mapping[str, Any]) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == spec.get("json")
