"""Reads and writes adapters in the format of the package peft: `adapter_config.json`,
`adapter_model.safetensors`. peft has an adapter for each linear layer of the published model:

A [r, in] and B [out, r]. If one layer of that model is several parts of ours (GPT-2's c_attn,
Phi-3's qkv_proj), their adapters become one, with the sum of the ranks: A stacks theirs, and B is
block diagonal. When read back, every part gets the whole of A, and its rows of B.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from spmdtrain.config.errors import CheckpointError, ConfigError, StorageError
from spmdtrain.config.schema import FinetuneConfig, RunConfig
from spmdtrain.interop import paired_rotation
from spmdtrain.interop.names.entry import EMBED, HEAD, OURS
from spmdtrain.interop.names.family_names import NAMES
from spmdtrain.interop.names.model_table import stack_table
from spmdtrain.interop.published_weights import sizes_of
from spmdtrain.interop.safetensors_files import open_file
from spmdtrain.interop.writer import new_folder
from spmdtrain.models.adapters.adapted import LinearPart, parts_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Values = Mapping[str, np.ndarray]  # by our dotted path, layers in order


@dataclass(frozen=True)
class Module:
    """A linear layer of the published model: its name with {} for the layer, and our parts."""

    name: str
    path: str
    parts: tuple[LinearPart, ...]
    paired_dim: int = 0  # channels of a head whose pairs are adjacent in the file; 0: none are

    def to_file(self, rows: np.ndarray) -> np.ndarray:
        """Returns what belongs to our outputs, in the order of the file's rows."""
        return paired_rotation.to_pairs(rows, self.paired_dim) if self.paired_dim else rows

    def of_file(self, rows: np.ndarray) -> np.ndarray:
        """Returns what belongs to the file's rows, in the order of our outputs."""
        return paired_rotation.to_halves(rows, self.paired_dim) if self.paired_dim else rows

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


def write_adapters(
    folder: Path, values: Values, config: RunConfig, family: str, base: str | None = None
) -> int:
    """Writes the adapters among `values`, and the weights that [finetune] trains whole.

    Returns the number of tensors. `family` is the model_type of the base, and `base` its name or
    directory, which peft loads. Raises ConfigError if the run has no adapters, or one for a weight
    that the family lacks.
    """
    finetune = config.finetune
    if not finetune.has_adapters:
        raise ConfigError("the run has no adapters", found="finetune.kind='full'", fix="--to hf")
    _refuse_layers_apart(config)
    tensors: dict[str, np.ndarray] = {}
    adapted: dict[Module, int] = {}
    for module in _modules(values, config, family):
        trained = [part for part in module.parts if _at(module, part, "a") in values]
        if trained:
            adapted[module] = len(trained)
            for layer in range(config.model.layers):
                name = PREFIX + module.name.replace("{}", str(layer))
                tensors |= {
                    name + ending: np.ascontiguousarray(x, np.float32)
                    for ending, x in _written(module, values, layer).items()
                }
    _check_all_written(values, adapted)
    whole = dict(_trained_whole(values, config, family))
    tensors |= {PREFIX + name: x for name, x in whole.items()}
    document = _config(finetune, family, base, adapted, sorted(whole))
    with new_folder(folder) as spare:
        try:
            (spare / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, spare / WEIGHTS, {"format": "pt"})
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error.strerror}") from None
    return len(tensors)


def _refuse_layers_apart(config: RunConfig) -> None:
    """Refuses a model with dense layers before its stack, whose adapters are outside the stack, and
    one whose layers differ in shape.
    """
    model = config.model
    if model.stack_layers < model.layers:
        raise ConfigError(
            "adapters of a model with model.experts.first_dense cannot be written for peft",
            found=f"first_dense={model.layers - model.stack_layers}",
            fix="--to hf, which merges them",
        )
    kinds = len(set(model.layer_parts))
    if kinds > 1:
        raise ConfigError(
            "adapters of a model whose layers are of several kinds cannot be written for peft",
            found=f"{kinds} kinds of layers",
            fix="--to hf, which merges them",
        )


def _modules(values: Values, config: RunConfig, family: str) -> Iterator[Module]:
    """Yields the linear layers of the published model whose weights are in `values`."""
    for path, entry in stack_table(family, config.model).items():
        if path not in values or not path.startswith(OURS) or values[path].ndim < 3:
            continue
        parts = parts_of(path, values[path].shape)
        names = [name.removesuffix(".weight") for name in entry.names]
        if len(names) == len(parts):
            is_paired = entry.rule is paired_rotation.qkv
            for name, part in zip(names, parts, strict=True):
                turns = is_paired and part.name in ("q", "k")
                yield Module(name, path, (part,), values[path].shape[-1] if turns else 0)
        else:
            yield Module(names[0], path, parts)


def _at(module: Module, part: LinearPart, name: str) -> str:
    return f"{module.path}.{part.name}.{name}"


def _written(module: Module, values: Values, layer: int) -> dict[str, np.ndarray]:
    """Returns the tensors of one layer's adapter, by the ending of their names."""
    w = np.asarray(values[module.path][layer], np.float32)
    a_rows, b_blocks, magnitudes = [], [], []
    has_magnitudes = False
    for part in module.parts:
        a = values.get(_at(module, part, "a"))
        outs = math.prod(part.of(w).shape) // _inputs(w, values, module)
        if a is None:
            b_blocks.append(np.zeros((outs, 0), np.float32))
            magnitudes.append(np.linalg.norm(part.of(w).reshape(-1, outs), axis=0))
            continue
        rank = a.shape[-1]
        a_rows.append(a[layer].reshape(-1, rank).T)
        rows = values[_at(module, part, "b")][layer].reshape(rank, -1).T
        b_blocks.append(module.to_file(rows))
        magnitude = values.get(_at(module, part, "magnitude"))
        if magnitude is not None:
            has_magnitudes = True
            magnitudes.append(module.to_file(magnitude[layer]))
    tensors = {
        ".lora_A.weight": np.concatenate(a_rows),
        ".lora_B.weight": _diagonal(b_blocks),
    }
    if has_magnitudes:
        tensors[".lora_magnitude_vector"] = np.concatenate(magnitudes)
    return tensors


def _inputs(w: np.ndarray, values: Values, module: Module) -> int:
    """Returns the number of inputs that one layer's matmul contracts."""
    a = next(x for part in module.parts if (x := values.get(_at(module, part, "a"))) is not None)
    return math.prod(w.shape[: a.ndim - 2])


def _diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the block diagonal matrix of these blocks [rows, columns]."""
    matrix = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.float32)
    row = column = 0
    for block in blocks:
        rows, columns = block.shape
        matrix[row : row + rows, column : column + columns] = block
        row, column = row + rows, column + columns
    return matrix


def _check_all_written(values: Values, adapted: Mapping[Module, int]) -> None:
    """Refuses an adapter for a weight that the family lacks."""
    paths = {module.path for module in adapted}
    for path in values:
        weight, _, name = path.rpartition(".")
        if name == "a" and weight.rpartition(".")[0] in values:
            of_weight = weight.rpartition(".")[0]
            if of_weight not in paths:
                raise ConfigError(
                    f"peft has no name for the adapter of {of_weight}", fix="spmdtrain.weights(RUN)"
                )


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
        entry = stack_table(family, config.model)[path]
        stacked = path.startswith(OURS)
        for layer, one in enumerate(x) if stacked else [(None, x)]:
            mapped = entry.rule(sizes_of(config.model), one.shape)
            yield from zip(entry.of_layer(layer), mapped.write(np.asarray(one)), strict=True)


def _head_name(family: str) -> str:
    (name,) = NAMES[family].whole[HEAD].of_layer(None)
    return name


def _also_trained(
    values: Values, config: RunConfig, family: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, value) of the weights of `finetune.also_train`."""
    table = stack_table(family, config.model)
    for path, x in values.items():
        if any(fnmatchcase(path, pattern) for pattern in config.finetune.also_train):
            if path not in table:
                raise ConfigError(f"{path} is trained, but no tensor of {family} holds it")
            yield path, x


def _config(
    finetune: FinetuneConfig,
    family: str,
    base: str | None,
    adapted: Mapping[Module, int],
    whole: Sequence[str],
) -> dict[str, Any]:
    """Returns adapter_config.json: the keys that every version of peft reads."""
    several = {module.last: count for module, count in adapted.items() if count > 1}
    root = 0.5 if finetune.rank_stabilised else 1.0
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": finetune.rank,
        "lora_alpha": finetune.alpha,
        "lora_dropout": finetune.dropout,
        "target_modules": sorted({module.last for module in adapted}),
        "bias": "none",
        "fan_in_fan_out": family == "gpt2",
        "use_rslora": finetune.rank_stabilised,
        "use_dora": finetune.kind == "dora",
        "modules_to_save": [name.rpartition(".")[0] for name in whole] or None,
        "rank_pattern": {name: count * finetune.rank for name, count in several.items()},
        # The scale alpha / rank, or alpha / sqrt(rank), must not change.
        "alpha_pattern": {name: count**root * finetune.alpha for name, count in several.items()},
        "layers_to_transform": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


# Read back


def read_adapters(folder: Path, values: Values, config: RunConfig, family: str) -> dict[str, Any]:
    """Returns the trained arrays in a peft directory, by our dotted path, float32.

    `values` are those of a model with the adapters that `config` asks for in [finetune]; the arrays
    returned have their shapes, stacked over the layers. Raises CheckpointError if the directory
    holds other adapters than the config asks for.
    """
    _refuse_layers_apart(config)
    document = _read_config(folder)
    _check_config(folder, document, config.finetune)
    tensors = open_file(folder / WEIGHTS)
    trained: dict[str, np.ndarray] = {}
    used: set[str] = set()

    def read(name: str) -> np.ndarray:
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks {name}", fix="the settings of its own config")
        used.add(name)
        return np.asarray(tensors[name].map(), np.float32)

    for module in _modules(values, config, family):
        has_adapter = [_at(module, part, "a") in values for part in module.parts]
        if not any(has_adapter):
            continue
        if not all(has_adapter):
            names = ", ".join(part.name for part in module.parts)
            what = f"{module.name} is a single layer in {family}, with one adapter in {folder}"
            raise CheckpointError(what, fix=f"finetune.targets with all of {names}")
        row = 0
        for part in module.parts:
            arrays = _read_part(module, part, values, read, row)
            row += arrays["b"].size // arrays["b"].shape[0] // arrays["b"].shape[1]
            for name, x in arrays.items():
                like = values[_at(module, part, name)]
                if x.size != like.size:
                    raise CheckpointError(
                        f"{PREFIX}{module.name} of {folder} has another shape",
                        asked=f"{_at(module, part, name)} {list(like.shape)}",
                        found=f"{x.size} numbers",
                        fix=f"--set finetune.rank={document.get('r')}",
                    )
                trained[_at(module, part, name)] = x.reshape(like.shape)
    for path, x in _also_trained(values, config, family):
        stacked = path.startswith(OURS)
        entry = stack_table(family, config.model)[path]
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


def _read_part(
    module: Module, part: LinearPart, values: Values, read: Any, row: int
) -> dict[str, Any]:
    """Returns the arrays of a part, stacked over the layers; `row`: where its rows of B begin."""
    like = values[_at(module, part, "b")]
    layers, outs = like.shape[0], math.prod(like.shape[2:])
    names = [PREFIX + module.name.replace("{}", str(layer)) for layer in range(layers)]
    rows = slice(row, row + outs)
    arrays = {
        "a": np.stack([read(f"{name}.lora_A.weight").T for name in names]),
        "b": np.stack([module.of_file(read(f"{name}.lora_B.weight")[rows]).T for name in names]),
    }
    if _at(module, part, "magnitude") in values:
        arrays["magnitude"] = np.stack(
            [module.of_file(read(f"{name}.lora_magnitude_vector")[rows]) for name in names]
        )
    return arrays


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / CONFIG).read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is not a table")
    except OSError as error:
        what = f"{folder} is not a peft adapter: {CONFIG}: {error.strerror}"
        raise CheckpointError(what, fix="the folder that holds it") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} is damaged: {error}") from None
    return document


def _check_config(folder: Path, document: Mapping[str, Any], finetune: FinetuneConfig) -> None:
    """Refuses an adapter that computes something other than [finetune] says."""
    # key -> (the value expected, peft's default)
    expected: dict[str, tuple[Any, Any]] = {
        "peft_type": ("LORA", None),
        "r": (finetune.rank, 8),
        "lora_alpha": (finetune.alpha, 8),
        "use_rslora": (finetune.rank_stabilised, False),
        "use_dora": (finetune.kind == "dora", False),
        "bias": ("none", "none"),
        "rank_pattern": ({}, {}),
        "alpha_pattern": ({}, {}),
    }
    settings = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rank_stabilised"}
    for key, (wanted, default) in expected.items():
        value = document.get(key) or default
        if value != wanted:
            name = settings.get(key)
            raise CheckpointError(
                f"{folder / CONFIG}: {key}={json.dumps(value)}",
                asked=json.dumps(wanted),
                fix=f"--set finetune.{name}={json.dumps(value)}" if name else "another adapter",
            )
