"""Maps the tensors of a file to one of our parameters: written once, used in both directions.

A parameter of one layer is made from boxes. Each box is a part of one tensor of the file, reshaped
and transposed, so no number changes. Reading and writing are therefore exact inverses, and a slice
of a parameter touches only the part of the file that it needs.

Letters: E embed, H query heads, K key-value heads, G = H / K, d head_dim, F ffn. Weights of
`nn.Linear` are [out, in], those of GPT-2's Conv1D [in, out].
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]
SQUARE = 256  # numbers on a side: 128 KiB of bfloat16, which a core's own cache holds
LINE = 64  # bytes of a line of the cache


@dataclass(frozen=True)
class Sizes:
    """The sizes that shapes consist of, named by the letters above."""

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    query_rank: int = 0  # of latent attention: the width of the latent of queries
    rope_dim: int = 0  # the rotated channels of a head
    key_dim: int = 0  # of the gated delta rule: the channels of a head's keys
    state_heads: int = 0  # of the state space: its heads,
    state_width: int = 0  # the channels of their values together,
    state: int = 0  # and those of a group's keys

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Piece:
    """A box of a parameter: rows `rows` (dim `axis`) of tensor number `source`.

    They are reshaped to `shape` and transposed by `order`; the result fills `places` of dim `dim`
    of the parameter in the shape `Mapped.view`.
    """

    source: int
    axis: int
    rows: slice
    shape: Shape
    order: tuple[int, ...]
    dim: int
    places: slice


class Rows(NamedTuple):
    """The rows of a tensor that one parameter holds; other parameters hold the others."""

    tensor: np.ndarray
    rows: tuple[slice, ...]


Written = np.ndarray | Rows


@dataclass(frozen=True)
class Mapped:
    """A parameter of one layer: its `shape`, viewed as `view`, and the `shapes` of its tensors."""

    shape: Shape
    view: Shape
    shapes: tuple[Shape, ...]
    pieces: tuple[Piece, ...]

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of the parameter, made from the tensors of the file."""
        tensors = list(tensors)
        if self.view != self.shape:  # a bias, which is small, or channels in another order
            return self._read(tensors, _whole(self.view)).reshape(self.shape)[index]
        return self._read(tensors, index)

    def _read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        bounds = [part.indices(size) for part, size in zip(index, self.view, strict=True)]
        shape = tuple(max(stop - start, 0) for start, stop, _ in bounds)
        dtypes = {tensor.dtype for tensor in tensors}
        out = np.empty(shape, dtypes.pop() if len(dtypes) == 1 else np.float32)
        for piece in self.pieces:
            start, stop, _ = bounds[piece.dim]
            places = range(*piece.places.indices(self.view[piece.dim]))
            low = len(range(places.start, start, places.step))
            high = len(range(places.start, min(stop, places.stop), places.step))
            if low >= high:
                continue
            cut = [slice(first, last) for first, last, _ in bounds]
            cut[piece.dim] = slice(low, high)
            target = [slice(None)] * len(shape)
            target[piece.dim] = slice(
                places[low] - start, places[high - 1] - start + 1, places.step
            )
            box = self._box(piece, tensors[piece.source])[tuple(cut)]
            _copy(out[tuple(target)], box)
        return out

    def _box(self, piece: Piece, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of the part of a tensor that fills a box."""
        cut = (*[slice(None)] * piece.axis, piece.rows)
        part = tensor[cut]
        if part.flags.c_contiguous:
            return part.reshape(piece.shape).transpose(piece.order)
        # Columns of a matrix: split along them, which needs no copy.
        return _split(part, piece.shape).transpose(piece.order)

    def write(self, parameter: np.ndarray) -> list[Written]:
        """Returns the tensors of the file, made of the parameter."""
        viewed = parameter.reshape(self.view)
        tensors = [np.empty(shape, parameter.dtype) for shape in self.shapes]
        for piece in self.pieces:
            cut = [slice(None)] * viewed.ndim
            cut[piece.dim] = piece.places
            back = np.argsort(piece.order)
            box = viewed[tuple(cut)].transpose(back)
            target = tensors[piece.source][(*[slice(None)] * piece.axis, piece.rows)]
            if target.flags.c_contiguous:
                _copy(target.reshape(box.shape), box)
                continue
            in_order = np.empty(box.shape, box.dtype)
            _copy(in_order, box)
            target[...] = in_order.reshape(target.shape)
        return [self._held(source, tensor) for source, tensor in enumerate(tensors)]

    def _held(self, source: int, tensor: np.ndarray) -> Written:
        """Returns a tensor, or those of its rows that the parameter holds."""
        own = [piece for piece in self.pieces if piece.source == source]
        rows = [piece.rows for piece in own if piece.axis == 0]
        if len(rows) < len(own) or sum(cut.stop - cut.start for cut in rows) == len(tensor):
            return tensor
        return Rows(tensor, tuple(rows))


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `target`, in squares of the two dims that are contiguous in each."""
    if target.dtype == source.dtype:  # numpy copies words faster than foreign dtypes
        word = np.dtype(f"u{target.itemsize}")
        target, source = target.view(word), source.view(word)
    longer = [axis for axis, size in enumerate(target.shape) if size > 1]
    last = longer[-1] if longer else None
    close = min(longer, key=lambda axis: source.strides[axis], default=None)
    if close is None or last is None or close == last:
        target[...] = source
        return
    others = [size for axis, size in enumerate(target.shape) if axis not in (close, last)]
    targets = np.moveaxis(target, (last, close), (-2, -1))
    sources = np.moveaxis(source, (last, close), (-2, -1))
    for outer in np.ndindex(*others):
        _transpose(targets[outer], sources[outer])


def _transpose(target: np.ndarray, source: np.ndarray) -> None:
    """Copies a matrix whose rows are contiguous in `source`, and its columns in `target`.

    Each square is first copied into rows that are one cache line longer. In the matrix itself the
    numbers of a column are a row apart: if that is a power of two, all fall on the same few cache
    lines, and the copy runs at a quarter of the speed.
    """
    rows, columns = source.shape
    line = LINE // source.itemsize
    square = np.empty((min(rows, SQUARE), min(columns, SQUARE) + line), source.dtype)
    for top, start in itertools.product(range(0, rows, SQUARE), range(0, columns, SQUARE)):
        cut = slice(top, top + SQUARE), slice(start, start + SQUARE)
        part = source[cut]
        near = square[: part.shape[0], : part.shape[1]]
        near[...] = part
        target[cut] = near


class AnyMapped(Protocol):
    """A parameter of one layer: its shape, its tensors' shapes, and the conversion both ways."""

    @property
    def shape(self) -> Shape: ...

    @property
    def shapes(self) -> tuple[Shape, ...]: ...

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray: ...

    def write(self, parameter: np.ndarray) -> Sequence[Written]: ...


@dataclass(frozen=True)
class MappedExperts:
    """A parameter of one layer's experts [X, ...], each mapped by `of_one`, in the order of the
    experts.

    The tensors are those of the first expert, then those of the second. Layers that are stacked
    outside the stack of a pipeline are read in the same way.
    """

    of_one: AnyMapped
    count: int

    @property
    def shape(self) -> Shape:
        return (self.count, *self.of_one.shape)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.of_one.shapes * self.count

    @property
    def other_shapes(self) -> Sequence[tuple[Shape, ...]]:
        return [shapes * self.count for shapes in other_shapes(self.of_one)]

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of the parameter, made from the tensors of the file."""
        first, *others = index
        per_expert = len(self.of_one.shapes)
        own = range(self.count)[first]
        experts = [
            self.of_one.read(tensors[per_expert * at : per_expert * (at + 1)], tuple(others))
            for at in own
        ]
        return (
            np.stack(experts)
            if experts
            else self.of_one.read(tensors[:per_expert], tuple(others))[:0]
        )

    def write(self, parameter: np.ndarray) -> list[Written]:
        """Returns the tensors of the file, made of the parameter."""
        return [tensor for one in parameter for tensor in self.of_one.write(one)]


@dataclass(frozen=True)
class Zeros:
    """A parameter of one layer that the files do not hold; it starts as zeros."""

    shape: Shape
    shapes: tuple[Shape, ...] = ()

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:  # noqa: ARG002
        """Returns zeros in the shape of the slice `index`."""
        return np.zeros(self.shape, np.float32)[index]

    def write(self, parameter: np.ndarray) -> list[Written]:  # noqa: ARG002
        """Returns no tensor."""
        return []


def other_shapes(mapped: AnyMapped) -> Sequence[tuple[Shape, ...]]:
    """Returns the shapes that tensors have in other files, in each way, for the same parameter."""
    return getattr(mapped, "other_shapes", ())


def _whole(shape: Shape) -> Index:
    return tuple(slice(0, size) for size in shape)


def _split(part: np.ndarray, shape: Shape) -> np.ndarray:
    """Returns part [rows, columns] as [rows, *shape[1:]] without a copy."""
    strides = [part.strides[0]]
    inner = part.strides[1]
    for size in reversed(shape[1:]):
        strides.insert(1, inner)
        inner *= size
    return np.lib.stride_tricks.as_strided(part, shape, strides, writeable=False)


Rule = Callable[[Sizes, Shape], AnyMapped]  # called with the sizes and the shape of the parameter


def copy(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes the tensor unchanged."""
    whole = Piece(0, 0, slice(0, shape[0]), shape, tuple(range(len(shape))), 0, slice(0, shape[0]))
    return Mapped(shape, shape, (shape,), (whole,))


def transpose(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes [out, in] of the file as our [in, out]."""
    return _one(shape[::-1], shape, shape[::-1], (1, 0))


def one_row(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes a matrix of one row as a vector."""
    return _one((1, *shape), shape, shape, (0,))


def split_vector(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes a vector as a matrix with its parts in rows."""
    return _one((math.prod(shape),), shape, shape, (0, 1))


def taps(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes the taps [n, 1, w] of a convolution by channel as [n, w]."""
    return _one((shape[0], 1, shape[1]), shape, shape, (0, 1))


def heads_out(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes the output projection [E, H d] as [K, G, d, E]."""
    *heads, embed = shape
    return _one((embed, math.prod(heads)), shape, (embed, *heads), (1, 2, 3, 0))


def heads_first(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes [H d, in] of the file as [in, H, d]."""
    inputs, heads, dim = shape
    return _one((heads * dim, inputs), shape, (heads, dim, inputs), (2, 0, 1))


def heads_out_rows(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes GPT-2's output projection [H d, E] as [K, G, d, E]."""
    *heads, embed = shape
    return _one((math.prod(heads), embed), shape, shape, (0, 1, 2, 3))


def gate_up(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes gate [F, E] and up [F, E] as [E, 2, F]."""
    embed, _, ffn = shape
    pieces = tuple(
        Piece(number, 0, slice(0, ffn), (ffn, 1, embed), (2, 1, 0), 1, slice(number, number + 1))
        for number in (0, 1)
    )
    return Mapped(shape, shape, ((ffn, embed),) * 2, pieces)


def gate_up_fused(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes one tensor [2 F, E], gate first, as [E, 2, F]."""
    embed, _, ffn = shape
    return _one((2 * ffn, embed), shape, (2, ffn, embed), (2, 0, 1))


def gate_up_bias(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes the biases of gate [F] and up [F] as [2, F]."""
    _, ffn = shape
    pieces = tuple(
        Piece(number, 0, slice(0, ffn), (1, ffn), (0, 1), 0, slice(number, number + 1))
        for number in (0, 1)
    )
    return Mapped(shape, shape, ((ffn,),) * 2, pieces)


def zeros(sizes: Sizes, shape: Shape) -> Zeros:  # noqa: ARG001 - as the other rules
    """Takes no tensor."""
    return Zeros(shape)


def of_each_expert(sizes: Sizes, shape: Shape, *, rule: Rule) -> MappedExperts:
    """Takes the tensors of each expert by `rule`, as [X, ...]."""
    return MappedExperts(rule(sizes, shape[1:]), shape[0])


def gate_up_stacked(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the others
    """Takes one tensor [X, 2 F, E] of all experts, gate first, as [X, E, 2, F]."""
    count, embed, _, ffn = shape
    return _one((count, 2 * ffn, embed), shape, (count, 2, ffn, embed), (0, 3, 1, 2))


def gate_up_stacked_columns(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the others
    """Takes one tensor [X, E, 2 F] of all experts, gates in the first columns, as [X, E, 2, F]."""
    count, embed, _, ffn = shape
    return _one((count, embed, 2 * ffn), shape, shape, (0, 1, 2, 3))


def transpose_stacked(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the others
    """Takes one tensor [X, out, in] of all experts as our [X, in, out]."""
    count, ins, outs = shape
    return _one((count, outs, ins), shape, (count, outs, ins), (0, 2, 1))


def gate_up_interleaved(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the others
    """Takes one tensor [..., E, 2 F], gates in the even columns, as [..., E, 2, F]."""
    *outer, _, ffn = shape
    order = (*range(len(outer)), len(outer) + 1, len(outer))
    return _one((*outer, 2 * ffn), shape, (*outer, ffn, 2), order)


def qkv(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes three tensors [H d, E], [K d, E], [K d, E] as [E, K, G + 2, d]."""
    return _qkv(sizes, shape, fused=False, transposed=True)


def qkv_gates_apart(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes four tensors [H d, E], [H d, E], [K d, E], [K d, E] of queries, gates of channels, keys
    and values as [E, K, 2 G + 2, d]: each query stands before its gate.
    """
    embed, heads, slots, dim = shape
    group = sizes.group
    places = (
        *(slice(first, 2 * group, 2) for first in (0, 1)),
        *(slice(at, at + 1) for at in (slots - 2, slots - 1)),
    )
    counts = (group, group, 1, 1)
    shapes = tuple((heads * count * dim, embed) for count in counts)
    pieces = tuple(
        Piece(number, 0, slice(0, rows), (heads, count, dim, embed), (3, 0, 1, 2), 2, place)
        for number, (count, place, (rows, _)) in enumerate(zip(counts, places, shapes, strict=True))
    )
    return Mapped(shape, shape, shapes, pieces)


def queries(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes one tensor [H d, E] as [E, K, G, d]."""
    return _qkv(sizes, shape, fused=False, transposed=True, alone=0)


def queries_and_keys(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes two tensors [H d, E] and [K d, E] as [E, K, G + 1, d]: keys are also values."""
    return _qkv(sizes, shape, fused=False, transposed=True, alone=1)


def qkv_fused(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes one tensor [(H + 2 K) d, E]: rows of queries, of keys, of values."""
    return _qkv(sizes, shape, fused=True, transposed=True)


def qkv_fused_columns(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes GPT-2's one tensor [E, (H + 2 K) d]."""
    return _qkv(sizes, shape, fused=True, transposed=False)


def qkv_bias(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes three biases as [K (G + 2) d]."""
    return _qkv_bias(sizes, shape, fused=False)


def queries_bias(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes one bias [H d] as [K G d]."""
    return _qkv_bias(sizes, shape, fused=False, alone=0)


def queries_and_keys_bias(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes two biases [H d] and [K d] as [K (G + 1) d]: that of keys is also that of values."""
    return _qkv_bias(sizes, shape, fused=False, alone=1)


def qkv_bias_fused(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes one bias [(H + 2 K) d] as [K (G + 2) d]."""
    return _qkv_bias(sizes, shape, fused=True)


def _one(file: Shape, shape: Shape, split: Shape, order: tuple[int, ...]) -> Mapped:
    """Returns the mapping that splits one tensor into dims, and transposes them."""
    piece = Piece(0, 0, slice(0, file[0]), split, order, 0, slice(0, shape[0]))
    return Mapped(shape, shape, (file,), (piece,))


def _slots(sizes: Sizes, slots: int, alone: int = 2) -> list[tuple[int, slice, slice]]:
    """Returns slots of queries, keys and values: (count, places, rows in a fused tensor).

    Those of queries may be in pairs with the gates of their channels, in files as in ours. `alone`:
    the slots behind them, each a tensor.
    """
    wide = sizes.kv_heads * sizes.head_dim
    queries = slots - alone
    return [
        (queries, slice(0, queries), slice(0, queries * wide)),
        *(
            (1, slice(at, at + 1), slice(at * wide, (at + 1) * wide))
            for at in range(queries, slots)
        ),
    ]


def _qkv(sizes: Sizes, shape: Shape, *, fused: bool, transposed: bool, alone: int = 2) -> Mapped:
    embed, heads, slots, dim = shape
    pieces = []
    shapes = []
    for number, (count, places, rows) in enumerate(_slots(sizes, slots, alone)):
        size = heads * count * dim
        at = rows if fused else slice(0, size)
        source = 0 if fused else number
        split = (heads, count, dim)
        if transposed:
            piece = Piece(source, 0, at, (*split, embed), (3, 0, 1, 2), 2, places)
        else:
            piece = Piece(source, 1, at, (embed, *split), (0, 1, 2, 3), 2, places)
        pieces.append(piece)
        shapes.append((size, embed) if transposed else (embed, size))
    if fused:
        size = heads * slots * dim
        shapes = [(size, embed) if transposed else (embed, size)]
    return Mapped(shape, shape, tuple(shapes), tuple(pieces))


def _qkv_bias(sizes: Sizes, shape: Shape, *, fused: bool, alone: int = 2) -> Mapped:
    heads, dim = sizes.kv_heads, sizes.head_dim
    slots = math.prod(shape) // (heads * dim)
    view = (heads, slots, dim)
    pieces = []
    shapes = []
    for number, (count, places, rows) in enumerate(_slots(sizes, slots, alone)):
        at = rows if fused else slice(0, heads * count * dim)
        pieces.append(
            Piece(0 if fused else number, 0, at, (heads, count, dim), (0, 1, 2), 1, places)
        )
        shapes.append((heads * count * dim,))
    return Mapped(shape, view, (shape,) if fused else tuple(shapes), tuple(pieces))
