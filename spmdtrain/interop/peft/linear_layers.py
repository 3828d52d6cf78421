"""Tells which linear layers of a published model hold which parts of our weights, row by row.

A layer of theirs may be several parts of ours (GPT-2's c_attn), and a part of ours several layers
of theirs. Their rows may be in another order than our outputs.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.interop.names.model_sizes import sizes_of
from spmdtrain.interop.names.model_table import LayerEntry, entries_of_layers
from spmdtrain.interop.pieces import Rows, Written
from spmdtrain.models.adapters.adapted import LinearPart, parts_of

Values = Mapping[str, np.ndarray]  # by our dotted path, layers in order


class Member(NamedTuple):
    """A part of our weight at `path`, number `place` of its stack, in a linear layer of theirs.

    Row `rows[n]` of theirs is output `outs[n]` of the part, flattened.
    """

    path: str
    place: int
    part: LinearPart
    outs: np.ndarray
    rows: np.ndarray

    def at(self, name: str) -> str:
        """Returns the path of an array of the part's adapter."""
        return f"{self.path}.{self.part.name}.{name}"


class LinearLayer(NamedTuple):
    """A linear layer of the published model: its name, and what it holds of ours."""

    name: str
    members: list[Member]


def linear_layers(values: Values, model: TransformerConfig, family: str) -> list[LinearLayer]:
    """Returns the linear layers of the published model whose weights are in `values`."""
    layers: dict[str, LinearLayer] = {}
    for entry in entries_of_layers(family, model):
        if entry.path in values and _is_linear(entry.path, values[entry.path].ndim):
            for name, member in _members(entry, values[entry.path].shape[1:], model):
                layers.setdefault(name, LinearLayer(name, [])).members.append(member)
    return list(layers.values())


def _is_linear(path: str, dims: int) -> bool:
    """Returns whether a weight is a matrix: no vector, no bias of gates and values, nor the taps
    `w` of a convolution.
    """
    return dims > 2 and not path.endswith(("_bias", "w"))


def outputs(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dims of one layer's weight that its matmul does not contract.

    Names of weights end in the letters of their dims: those that begin at the stream `e` contract
    that one alone, and others all but the last.
    """
    letters = path.rpartition("_")[2]
    return shape[1:] if letters.startswith("e") else shape[-1:]


def _members(
    entry: LayerEntry, shape: tuple[int, ...], model: TransformerConfig
) -> Iterator[tuple[str, Member]]:
    """Yields (name of a linear layer, what it holds of a part) of one layer's weight."""
    outs = outputs(entry.path, shape)
    number_of = np.arange(math.prod(outs)).reshape(outs)
    orders = _orders(entry, shape, number_of, model)
    for part in parts_of(entry.path, shape, model):
        of_part = part.of(number_of).ravel()
        for name, order in zip(entry.entry.names, orders, strict=True):
            row_of = np.full(number_of.size, -1)
            own = np.flatnonzero(order >= 0)
            row_of[order[own]] = own
            rows = row_of[of_part]
            held = np.flatnonzero(rows >= 0)
            if held.size:
                member = Member(entry.path, entry.place, part, held, rows[held])
                yield name.removesuffix(".weight"), member


def _orders(
    entry: LayerEntry, shape: tuple[int, ...], number_of: np.ndarray, model: TransformerConfig
) -> list[np.ndarray]:
    """Returns, for each tensor, the numbers of our outputs in the order of its rows; -1 where a row
    is of another weight.
    """
    if len(shape) > number_of.ndim + 1:  # several dims are contracted, and the rest is the stream
        return [number_of.ravel()]
    of_one_input = entry.entry.rule(sizes_of(model), (1, *number_of.shape))
    return [_order(written) for written in of_one_input.write(number_of[None])]


def _order(written: Written) -> np.ndarray:
    if not isinstance(written, Rows):
        return written.ravel()
    order = np.full(len(written.tensor), -1)
    for cut in written.rows:
        order[cut] = written.tensor[cut].ravel()
    return order
