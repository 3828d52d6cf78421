"""Reads and writes adapters in the format of the package peft: `adapter_config.json`,
`adapter_model.safetensors`. peft has an adapter for each linear layer of the published model:

A [r, in] and B [out, r]. If one layer of that model is several parts of ours (GPT-2's c_attn,
Phi-3's qkv_proj, in_proj_qkv of the gated delta rule), their adapters become one, with the sum of
the ranks: A stacks theirs, and B is block diagonal. When read back, every part gets its block, and
of an adapter that peft has trained the whole of A, and its rows of B.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from spmdtrain.config.errors import CheckpointError, ConfigError, StorageError
from spmdtrain.config.schema import RunConfig
from spmdtrain.interop.names.entry import EMBED, HEAD, OURS
from spmdtrain.interop.names.family_names import NAMES
from spmdtrain.interop.names.model_sizes import sizes_of
from spmdtrain.interop.names.model_table import table_of
from spmdtrain.interop.names.spellings import spelled
from spmdtrain.interop.peft.adapter_config import (
    CONFIG,
    TEXT_PART,
    check_config,
    config_of,
    read_config,
)
from spmdtrain.interop.peft.linear_layers import LinearLayer, Member, Values, linear_layers, outputs
from spmdtrain.interop.pieces import Rows
from spmdtrain.interop.safetensors_files import open_file
from spmdtrain.interop.writer import new_folder

WEIGHTS = "adapter_model.safetensors"
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
PREFIX = "base_model.model."


def write_adapters(
    folder: Path,
    values: Values,
    config: RunConfig,
    family: str,
    base: str | None = None,
    *,
    has_tower: bool = False,
) -> int:
    """Writes the adapters among `values`, and the weights that [finetune] trains whole.

    Returns the number of tensors. `family` is the model_type of the base, or of its text part if
    `has_tower`, and `base` its name or directory, which peft loads. Raises ConfigError if the run
    has no adapters, or one for a weight that the family lacks.
    """
    finetune = config.finetune
    if not finetune.has_adapters:
        raise ConfigError("the run has no adapters", found="finetune.kind='full'", fix="--to hf")
    in_base = partial(spelled, spelling=TEXT_PART) if has_tower else str
    layers = linear_layers(values, config.model, family)
    adapted = [layer for layer in layers if _members_with_adapters(layer, values)]
    tensors = {
        PREFIX + in_base(layer.name) + ending: np.ascontiguousarray(x, np.float32)
        for layer in adapted
        for ending, x in _written(layer, values).items()
    }
    _check_all_written(values, adapted)
    whole = {in_base(name): x for name, x in _trained_whole(values, config, family)}
    tensors |= {PREFIX + name: x for name, x in whole.items()}
    targets = {in_base(name): count for name, count in _targets(layers, values).items()}
    document = config_of(config, family, base, targets, sorted(whole), has_tower=has_tower)
    with new_folder(folder) as spare:
        try:
            (spare / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            (spare / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
        except OSError as error:
            what = f"cannot write {folder}: {error.strerror}"
            raise StorageError(what, fix="another folder, or room on its disk") from None
    return len(tensors)


def _members_with_adapters(layer: LinearLayer, values: Values) -> int:
    return sum(member.at("a") in values for member in layer.members)


def _written(layer: LinearLayer, values: Values) -> dict[str, np.ndarray]:
    """Returns the tensors of a linear layer's adapter, by the ending of their names."""
    adapted = [member for member in layer.members if member.at("a") in values]
    rows = sum(member.rows.size for member in layer.members)
    a_of_members = [_inputs_by_rank(values[member.at("a")][member.place]).T for member in adapted]
    b = np.zeros((rows, sum(len(a) for a in a_of_members)), np.float32)
    column = 0
    for member, a in zip(adapted, a_of_members, strict=True):
        rank = len(a)
        of_outs = values[member.at("b")][member.place].reshape(rank, -1)
        b[member.rows, column : column + rank] = of_outs[:, member.outs].T
        column += rank
    tensors = {A: np.concatenate(a_of_members), B: b}
    if any(member.at("magnitude") in values for member in adapted):
        tensors[MAGNITUDE] = _magnitudes(layer, values, rows)
    return tensors


def _inputs_by_rank(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1, a.shape[-1])


def _magnitudes(layer: LinearLayer, values: Values, rows: int) -> np.ndarray:
    """Returns the magnitudes of all rows: norms of the weight's where a part has no adapter."""
    magnitudes = np.empty(rows, np.float32)
    for member in layer.members:
        if (path := member.at("magnitude")) in values:
            of_outs = values[path][member.place].ravel()
        else:
            w = np.asarray(member.part.of(values[member.path][member.place]), np.float32)
            outs = math.prod(outputs(member.path, w.shape))
            of_outs = np.linalg.norm(w.reshape(-1, outs), axis=0)
        magnitudes[member.rows] = of_outs[member.outs]
    return magnitudes


def _check_all_written(values: Values, layers: Iterable[LinearLayer]) -> None:
    """Refuses an adapter for a weight that the family lacks."""
    paths = {member.path for layer in layers for member in layer.members}
    for path in values:
        weight, _, name = path.rpartition(".")
        if name == "a" and weight.rpartition(".")[0] in values:
            of_weight = weight.rpartition(".")[0]
            if of_weight not in paths:
                raise ConfigError(
                    f"peft has no name for the adapter of {of_weight}", fix="spmdtrain.weights(RUN)"
                )


def _targets(layers: Sequence[LinearLayer], values: Values) -> dict[str, int]:
    """Returns the names by which peft finds the layers with adapters, and the parts that each has.

    An ending stands for all layers whose names end in it, if they have adapters of as many parts.
    """
    counts = {layer.name: _members_with_adapters(layer, values) for layer in layers}
    targets: dict[str, int] = {}
    for name, count in counts.items():
        endings = (".".join(name.split(".")[-words:]) for words in (1, 2))
        ending = next((end for end in endings if _counts_of(end, counts) == {count}), name)
        if count:
            targets[ending] = count
    return targets


def _counts_of(ending: str, counts: Mapping[str, int]) -> set[int]:
    return {count for name, count in counts.items() if f".{name}".endswith(f".{ending}")}


def _trained_whole(
    values: Values, config: RunConfig, family: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, tensor) of the weights of `finetune.also_train`.

    A head that shares a trained table is one more tensor: peft replaces each of the two layers by a
    separate copy.
    """
    for path, x in _also_trained(values, config, family):
        if path == EMBED and config.model.tied:
            yield _head_name(family), np.asarray(x)
        entry = table_of(family, config.model)[path]
        stacked = path.startswith(OURS)
        for layer, one in enumerate(x) if stacked else [(None, x)]:
            mapped = entry.rule(sizes_of(config.model), one.shape)
            for name, tensor in zip(
                entry.of_layer(layer), mapped.write(np.asarray(one)), strict=True
            ):
                if isinstance(tensor, Rows):
                    raise ConfigError(
                        f"{path} is trained as a whole, and is only a part of {name}",
                        fix="adapters of it: finetune.also_train without its pattern",
                    )
                yield name, tensor


def _head_name(family: str) -> str:
    (name,) = NAMES[family].whole[HEAD].of_layer(None)
    return name


def _also_trained(
    values: Values, config: RunConfig, family: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, value) of the weights of `finetune.also_train`."""
    table = table_of(family, config.model)
    for path, x in values.items():
        if any(fnmatchcase(path, pattern) for pattern in config.finetune.also_train):
            if path not in table:
                what = f"{path} is trained, but no tensor of {family} holds it"
                raise ConfigError(what, fix="spmdtrain export RUN DIR --to hf")
            yield path, x


# Read back


def read_adapters(folder: Path, values: Values, config: RunConfig, family: str) -> dict[str, Any]:
    """Returns the trained arrays in a peft directory, by our dotted path, float32.

    `values` are those of a model with the adapters that `config` asks for in [finetune]; the arrays
    returned have their shapes, stacked over the layers. Raises CheckpointError if the directory
    holds other adapters than the config asks for.
    """
    document = read_config(folder)
    layers = linear_layers(values, config.model, family)
    check_config(folder, document, config.finetune, _targets(layers, values))
    tensors = open_file(folder / WEIGHTS)
    trained: dict[str, np.ndarray] = {}
    used: set[str] = set()

    def read(name: str) -> np.ndarray:
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks {name}", fix="the settings of its own config")
        used.add(name)
        return np.asarray(tensors[name].map(), np.float32)

    for layer in layers:
        adapted = _members_with_adapters(layer, values)
        if not adapted:
            continue
        if adapted < len(layer.members):
            names = ", ".join(member.part.name for member in layer.members)
            what = f"{layer.name} is a single layer in {family}, with one adapter in {folder}"
            raise CheckpointError(what, fix=f"finetune.targets with all of {names}")
        has_magnitudes = layer.members[0].at("magnitude") in values
        endings = (A, B, MAGNITUDE) if has_magnitudes else (A, B)
        of_layer = {ending: read(PREFIX + layer.name + ending) for ending in endings}
        for number, member in enumerate(layer.members):
            arrays = _of_member(of_layer, layer, number, config.finetune.rank)
            try:
                _put(arrays, member, values, trained)
            except ValueError as error:
                raise CheckpointError(
                    f"{PREFIX}{layer.name} of {folder} {error}",
                    fix=f"--set finetune.rank={document.get('r')}",
                ) from None
    for path, x in _also_trained(values, config, family):
        stacked = path.startswith(OURS)
        entry = table_of(family, config.model)[path]
        whole = []
        for layer in range(len(x)) if stacked else [None]:
            mapped = entry.rule(sizes_of(config.model), x.shape[1:] if stacked else x.shape)
            parts = [read(PREFIX + name) for name in entry.of_layer(layer)]
            whole.append(mapped.read(parts, tuple(slice(0, size) for size in mapped.shape)))
        trained[path] = np.stack(whole) if stacked else whole[0]
        head = PREFIX + _head_name(family)
        shares_head = path == EMBED and config.model.tied and head in tensors
        if shares_head and not np.array_equal(read(head), trained[path]):
            raise CheckpointError(
                f"{folder} has trained the head apart from the table of tokens",
                asked="model.tied=true",
                fix="--set model.tied=false",
            )
    if unread := sorted(set(tensors) - used):
        more = f", and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise CheckpointError(
            f"{folder} holds {unread[0]}, which nothing reads{more}",
            fix="finetune.targets with its layer",
        )
    return trained


def _of_member(
    tensors: Mapping[str, np.ndarray], layer: LinearLayer, number: int, rank: int
) -> dict[str, np.ndarray]:
    """Returns what belongs to member `number` of a linear layer: a [i, r], b [r, o], magnitude [o].

    That is a block of A and B, as `write_adapters` writes them, or all of A, if peft has trained
    one adapter for all parts.
    """
    rows = layer.members[number].rows
    a, b = tensors[A], tensors[B][rows]
    if len(a) == rank * len(layer.members):
        block = slice(rank * number, rank * (number + 1))
        if np.count_nonzero(b) == np.count_nonzero(b[:, block]):
            a, b = a[block], b[:, block]
    arrays = {"a": a.T, "b": b.T}
    return arrays | {"magnitude": tensors[MAGNITUDE][rows]} if MAGNITUDE in tensors else arrays


def _put(
    arrays: Mapping[str, np.ndarray], member: Member, values: Values, trained: dict[str, np.ndarray]
) -> None:
    """Puts the arrays of a member into the adapter of its part, which several layers may share.

    Raises ValueError, with what they have, if they do not fit.
    """
    for name, x in arrays.items():
        path = member.at(name)
        trained.setdefault(path, np.full(values[path].shape, np.nan, np.float32))
        of_part = trained[path][member.place]
        if name == "a":
            target = of_part.reshape(-1, of_part.shape[-1])
            if not np.isnan(target).any() and not np.array_equal(target, x):
                raise ValueError(f"has another A than a layer with which it shares {path}")
            target, outs = target, slice(None)
        else:
            target = of_part.reshape(len(of_part) if name == "b" else 1, -1)
            outs = member.outs
        if target[:, outs].shape != np.atleast_2d(x).shape:
            asked = f"{path} {list(values[path].shape)}"
            raise ValueError(f"has another shape; asked {asked}; found {x.size} numbers")
        target[:, outs] = x
