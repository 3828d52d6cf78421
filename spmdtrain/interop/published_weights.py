"""Reads the weights of a published model as our parameters: part by part, never whole.

Every tensor of the files is used once, and every parameter is filled once; whatever does not fit is
refused before a number is read.
"""

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.named_file import AGAIN
from spmdtrain.config.published.read_config import Published
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.interop.names.entry import EMBED, FURTHER, HEAD, OURS, POSITIONS, Entry
from spmdtrain.interop.names.family_names import NAMES
from spmdtrain.interop.names.model_sizes import sizes_of
from spmdtrain.interop.names.model_table import layout_of, table_of
from spmdtrain.interop.names.spellings import SAY_NOTHING, name_in, spelled, spelling_of
from spmdtrain.interop.packings import UNPACKINGS, open_published
from spmdtrain.interop.pieces import AnyMapped, Index, Shape, other_shapes
from spmdtrain.interop.safetensors_files import Tensor

ROWS_AT_ONCE = 4096  # of a matrix that is compared or averaged
AT_ONCE = 2**16  # numbers that are looked at: they stay in the cache of a core
# The bits of the exponent of 16-bit floats, all of them 1 for a NaN or an infinity.
EXPONENTS = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}


@dataclass(frozen=True)
class MadeOf:
    """The tensors of one parameter, by layer: one entry for a parameter that is not stacked."""

    mapped: AnyMapped
    tensors: Sequence[Sequence[Tensor]]


class Maps(Sequence[np.ndarray]):
    """The arrays of tensors, each mapped on access: those of experts never exist all at once."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, at: Any) -> Any:
        chosen = self._tensors[at]
        return chosen.map() if isinstance(chosen, Tensor) else [tensor.map() for tensor in chosen]


class Weights:
    """The weights of a published model, as the parameters of `model`.

    `shapes` are those of the parameters, or of one layer of a stack; `ignored` are patterns of
    tensors to leave out. Raises CheckpointError if files and model differ.
    """

    def __init__(
        self,
        published: Published,
        model: TransformerConfig,
        shapes: Mapping[str, Shape],
        ignored: Sequence[str] = (),
    ):
        self.folder = published.folder
        self._published = published
        self._model = model
        self._sizes = sizes_of(model)
        self._in_files = open_published(published)
        check_dtypes(self._in_files, ignored)
        self._used: set[str] = set()
        self._not_finite: list[str] = []
        self._spelling = spelling_of(published.family, self._in_files)
        layout = layout_of(published.family, model, self._in_files)
        table = table_of(published.family, model, layout)
        table = UNPACKINGS[published.packing].table(table)
        if model.tied:
            self._check_tied(table)
        self._check_copies(table)
        entries = {path: self._entry(path, table) for path in shapes}
        self._check_none_missing(entries)
        self._check_none_unread(ignored)
        self._sources = {path: self._source(path, entries[path], shapes[path]) for path in shapes}
        self._means: dict[str, np.ndarray] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that are read, by name."""
        return {name: self._in_files[name] for name in sorted(self._used)}

    @property
    def in_files(self) -> Mapping[str, Tensor]:
        """All tensors of the files, by name."""
        return self._in_files

    def read(self, path: str, layer: int | None, index: Index) -> np.ndarray:
        """Returns a slice of a parameter, of one layer, in the dtype of the file.

        Rows of the vocabulary that the file lacks are the mean of its rows. A tensor with a NaN or
        an infinity is remembered: see `not_finite`.
        """
        part = self._read(path, layer, index)
        if not _is_finite(part):
            tensors = self._sources[path].tensors[layer or 0]
            self._not_finite += [tensor.name for tensor in tensors if not _is_finite(tensor.map())]
        return part

    @property
    def not_finite(self) -> str | None:
        """The name of a tensor in which a NaN or an infinity has been read; None if there is none.

        Processes read different parts, so their answers may differ.
        """
        return self._not_finite[0] if self._not_finite else None

    def _read(self, path: str, layer: int | None, index: Index) -> np.ndarray:
        source = self._sources[path]
        mapped = source.mapped
        arrays = Maps(source.tensors[layer or 0])
        rows = mapped.shape[0] if mapped.shape else 0
        bounded = tuple(slice(*part.indices(2**62)) for part in index)
        if path not in (EMBED, HEAD) or bounded[0].stop <= rows:
            return mapped.read(arrays, index)
        first, *others = bounded
        known = mapped.read(arrays, (slice(min(first.start, rows), rows), *others))
        mean = self._mean(path, arrays[0])[tuple(others)].astype(known.dtype)
        more = min(first.stop, self._model.vocab or rows) - max(first.start, rows)
        return np.concatenate([known, np.broadcast_to(mean, (more, *mean.shape))])

    def _mean(self, path: str, table: np.ndarray) -> np.ndarray:
        if path not in self._means:
            total = np.zeros(table.shape[1:], np.float64)
            for start in range(0, len(table), ROWS_AT_ONCE):
                total += table[start : start + ROWS_AT_ONCE].astype(np.float32).sum(0, np.float64)
            self._means[path] = (total / len(table)).astype(np.float32)
        return self._means[path]

    def _names(self, entry: Entry, layer: int | None) -> tuple[str, ...]:
        names = (spelled(name, self._spelling) for name in entry.of_layer(layer))
        return tuple(name_in(self._in_files, name, self._published.family) for name in names)

    def _check_tied(self, table: Mapping[str, Entry]) -> None:
        """Accepts a head in the files of a tied model, if it is the embedding."""
        (head,) = self._names(table[HEAD], None)
        (embed,) = self._names(table[EMBED], None)
        if head not in self._in_files or embed not in self._in_files:
            return
        if not _are_equal(self._in_files[head], self._in_files[embed]):
            tied = self._published.settings["tied"]
            setting = "tie_word_embeddings" if tied else "model.tied"
            raise CheckpointError(
                f"{self.folder}: {setting} is true, but {head} differs from the embedding",
                fix="--untie" if tied else "--set model.tied=false",
            )
        self._used.add(head)

    def _check_copies(self, table: Mapping[str, Entry]) -> None:
        """Accepts copies of the model's tensors in a layer of model.multi_token, if they are
        equal.
        """
        further = NAMES[self._published.family].further
        for number in further.numbers(self._model):
            for path, copy in further.copies_of(number).items():
                ours = self._names(table[EMBED if self._model.tied else path], None)[0]
                name = spelled(copy, self._spelling)
                if name not in self._in_files:
                    continue
                if ours in self._in_files and not _are_equal(
                    self._in_files[name], self._in_files[ours]
                ):
                    raise CheckpointError(
                        f"{self.folder}: {name} differs from {ours}, which is shared here",
                        fix=f"--set model.multi_token=none --ignore '{_pattern(name)}'",
                    )
                self._used.add(name)

    def _entry(self, path: str, table: Mapping[str, Entry]) -> Entry:
        if path not in table:
            raise CheckpointError(
                f"{self.folder} has no {path}: {self._published.family} has no tensor for it",
                fix="the settings of the model's own config.json",
            )
        entry = table[path]
        if path == HEAD and self._names(entry, None)[0] not in self._in_files:
            if not self._published.settings["tied"]:
                (name,) = self._names(entry, None)
                raise CheckpointError(
                    f"{self.folder}: tie_word_embeddings is false, but {name} is missing",
                    fix="--set model.tied=true if it shares the embedding",
                )
            return table[EMBED]  # untied here: the head begins as the embedding
        if path == EMBED and self._is_head_alone(table):
            return table[HEAD]
        return entry

    def _is_head_alone(self, table: Mapping[str, Entry]) -> bool:
        """Returns True if the one matrix that embedding and head share has the head's name."""
        (embed,), (head,) = (self._names(table[path], None) for path in (EMBED, HEAD))
        is_tied = self._published.settings["tied"]
        return is_tied and embed not in self._in_files and head in self._in_files

    def _layers(self, path: str) -> Sequence[int | None]:
        return range(self._model.stacks[-1].rounds) if path.startswith(OURS) else (None,)

    def _check_none_missing(self, entries: Mapping[str, Entry]) -> None:
        wanted = [
            name
            for path, entry in entries.items()
            for layer in self._layers(path)
            for name in self._names(entry, layer)
        ]
        missing = [name for name in wanted if name not in self._in_files]
        if missing:
            self._refuse_without_further(missing, entries)
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{self.folder} lacks {missing[0]}{more}",
                asked=f"{self._model.layers} layers",
                found=f"{self._count_layers(wanted)} layers",
                fix="downloading all of its files",
            )
        self._used |= set(wanted)

    def _refuse_without_further(self, missing: Sequence[str], entries: Mapping[str, Entry]) -> None:
        """Raises CheckpointError if just the blocks that predict further tokens are missing."""
        of_further = {
            name
            for path, entry in entries.items()
            if path.startswith(FURTHER)
            for name in self._names(entry, None)
        }
        depth = self._model.multi_token.depth if self._model.multi_token else 0
        if not of_further or not of_further.issuperset(missing):
            return
        there = sorted(of_further - set(missing))
        if there:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            pattern = self._apart(there[0], of_further)
            raise CheckpointError(
                f"{self.folder} lacks {missing[0]}{more} of the layers that predict further tokens",
                found=f"{len(there)} of their {len(of_further)} tensors",
                fix=f"downloading all of its files, or --ignore '{pattern}'",
            )
        raise CheckpointError(
            f"{self.folder} lacks the layers that predict further tokens",
            asked=f"model.multi_token.depth={depth}",
            found=f"{self._model.layers} layers",
            fix="--set model.multi_token=none",
        )

    def _apart(self, name: str, names: Collection[str]) -> str:
        """Returns a pattern of a tensor and of those around it, but of none outside `names`, unless
        no layer of the model can have such a name.
        """
        top = name.partition(".")[0] + "."
        if NAMES[self._published.family].further.begin_at_0:
            return f"{top}*"
        shares = any(other.startswith(top) for other in self._in_files if other not in names)
        return _pattern(name) if shares else f"{top}*"

    def _count_layers(self, wanted: Sequence[str]) -> int:
        """Counts the layers of which at least one tensor exists."""
        numbers = {_layer_of(name) for name in self._in_files} - {None}
        return len(numbers) if wanted else 0

    def _check_none_unread(self, ignored: Sequence[str]) -> None:
        unread = [name for name in sorted(self._in_files) if name not in self._used]
        for pattern in ignored:
            if not fnmatch.filter(unread, pattern):
                raise CheckpointError(
                    f"{self.folder} holds no {pattern} that nothing reads", fix="no --ignore for it"
                )
        unread = [name for name in unread if not _is_ignored(name, ignored)]
        if not unread:
            return
        more = f", and {len(unread) - 1} more" if len(unread) > 1 else ""
        pattern = self._pattern(unread[0])
        raise CheckpointError(
            f"{self.folder} holds {unread[0]}, which nothing reads{more}",
            asked=f"{self._model.layers} layers",
            fix=f"--ignore '{pattern}'",
        )

    def _pattern(self, name: str) -> str:
        """Returns a pattern of a tensor that nothing reads, and of those that belong to it."""
        top = name.partition(".")[0] + "."
        if any(used.startswith(top) for used in self._used):
            return _pattern(name)
        return f"{top}*"

    def _source(self, path: str, entry: Entry, shape: Shape) -> MadeOf:
        tensors = [
            [self._in_files[name] for name in self._names(entry, layer)]
            for layer in self._layers(path)
        ]
        of_file = tensors[0][0].shape if entry.names else shape
        if path in (EMBED, HEAD):
            self._check_vocabulary(tensors[0][0], shape)
            shape = (of_file[0], *shape[1:])
        if path == POSITIONS and len(of_file) == 2 and of_file[0] > shape[0]:
            shape = (of_file[0], *shape[1:])  # a shorter model reads the first rows
        mapped = entry.rule(self._sizes, shape)
        for of_layer in tensors:
            if tuple(tensor.shape for tensor in of_layer) in other_shapes(mapped):
                continue
            for tensor, wanted in zip(of_layer, mapped.shapes, strict=True):
                if tensor.shape != wanted:
                    raise self._misshapen(tensor, wanted)
        return MadeOf(mapped, tensors)

    def _check_vocabulary(self, table: Tensor, shape: Shape) -> None:
        rows = table.shape[0] if table.shape else 0
        stated = self._published.settings["vocab"]
        grows = shape[0] > rows and rows == stated
        if rows == shape[0] or grows:
            return
        raise CheckpointError(
            f"{table.name} of {self.folder} has {rows} rows",
            asked=f"vocab_size={stated}" if shape[0] == stated else f"model.vocab={shape[0]}",
            fix=f"--set model.vocab={rows}",
        )

    def _misshapen(self, tensor: Tensor, wanted: Shape) -> CheckpointError:
        model = self._model
        return CheckpointError(
            f"{tensor.name} of {self.folder} has the shape {list(tensor.shape)}",
            asked=f"{list(wanted)} by embed={model.embed}, heads={model.heads}, "
            f"kv_heads={model.kv_heads}, head_dim={model.head_dim} and "
            f"ffn={model.ffn}",
            fix=f"the config.json of these weights, or {AGAIN}",
        )


def check_dtypes(tensors: Mapping[str, Tensor], ignored: Sequence[str] = ()) -> None:
    """Raises CheckpointError if a tensor that is needed has a type that cannot hold weights.

    Others, such as the masks that older versions stored, may have any type.
    """
    for name, tensor in tensors.items():
        if not _is_ignored(name, ignored):
            _ = tensor.dtype  # which raises


def _is_ignored(name: str, ignored: Sequence[str]) -> bool:
    if SAY_NOTHING.fullmatch(name):
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)


def _is_finite(numbers: np.ndarray) -> bool:
    """Returns True if there is no NaN and no infinity.

    16-bit numbers are judged by their exponents, as numpy is slow at foreign dtypes. It takes some
    numbers at a time, in the cache: all at once would take as much memory again.
    """
    exponent = EXPONENTS.get(numbers.dtype.name)
    flat = numbers.reshape(-1)
    spare = np.empty(min(AT_ONCE, flat.size), bool if exponent is None else np.uint16)
    for start in range(0, flat.size, AT_ONCE):
        part = flat[start : start + AT_ONCE]
        result = spare[: part.size]
        if exponent is None:
            is_finite = np.isfinite(part, out=result).all()
        else:
            is_finite = np.bitwise_and(part.view(np.uint16), exponent, out=result).max() < exponent
        if not is_finite:
            return False
    return True


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compares two tensors bit by bit, some rows at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    first, second = one.map(), other.map()
    word = np.uint16 if one.dtype.itemsize == 2 else np.uint32
    blocks = (slice(at, at + ROWS_AT_ONCE) for at in range(0, len(first), ROWS_AT_ONCE))
    return all(np.array_equal(first[at].view(word), second[at].view(word)) for at in blocks)


def _pattern(name: str) -> str:
    """Returns a pattern that matches a tensor and the others of its layer."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join([*parts[: at + 1], "*"])
    return name


def bytes_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns a description of the amount to read: "bfloat16 in 2 files, 1.2 GB"."""
    files = {tensor.path for tensor in tensors.values()}
    dtypes = sorted({str(tensor.dtype) for tensor in tensors.values()})
    size = sum(tensor.size for tensor in tensors.values())
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    return f"{' and '.join(dtypes)} in {count}, {in_words(size)}"


def in_words(size: int) -> str:
    """Returns a number of bytes as "1.2 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _layer_of(name: str) -> int | None:
    """Returns the layer of a tensor: the first number in its name; experts have later ones."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)
