"""Hashes the input of a step, the same on every mesh and number of processes.

It is the fingerprint (leaves/fingerprint.py) of the samples as one array by their global index: two
sums, modulo 2^32, of the bits of each entry mixed with its sample and position. The order of the
terms does not matter, so each device or process sums the rows that it has. One changed entry always
changes both sums.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.checkpoints.leaves.fingerprint import FACTORS, mixed
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup

if TYPE_CHECKING:
    from spmdtrain.parallel.context.context_method import ContextMethod

Sums = tuple[int, int]
OF_ROWS = "sample"  # the entry with the index of each row


def sums_of_rows(rows: Mapping[str, np.ndarray]) -> Sums:
    """Returns the sums of rows on the host; `rows["sample"]` are their global indices."""
    first, second = (int(sum_) % 2**32 for sum_ in _sums(rows, np))
    return first, second


def sums_of_batch(setup: Setup, batch: Batch) -> jax.Array:
    """Returns the sums of a batch of this setup on its devices, uint32 [2], in every process.

    They describe the rows as the data gives them, whatever order the mesh wants.
    """
    rows = dict(batch)
    if setup.zigzag > 1 and setup.config.data.packing == "stream":
        del rows["positions"]  # the data gave none: they result from the zigzag order
    return _on_devices(setup.context_method)(rows)


@functools.cache
def _on_devices(method: "ContextMethod | None") -> Callable[[Batch], jax.Array]:
    def sums(rows: Batch) -> jax.Array:
        order = method.token_order(rows["tokens"].shape[-1]) if method else None
        return jnp.stack(_sums(rows, jnp, order))

    return jax.jit(sums)


def text_of(sums: Sums) -> str:
    """Returns the sums as 16 hexadecimal digits."""
    return "".join(f"{sum_:08x}" for sum_ in sums)


def added(first: Sums, second: Sums) -> Sums:
    """Returns the sums over both of two sets of rows."""
    return (first[0] + second[0]) % 2**32, (first[1] + second[1]) % 2**32


def _sums(rows: Mapping[str, Any], xp: Any, order: np.ndarray | None = None) -> list[Any]:
    """Returns the two sums with numpy or jax.numpy. Entries are [..., time], or [...] like sample.

    `order`: the time of each entry of a row, if they do not ascend. The index of an entry counts
    all entries of all samples, so no two share one. Arrays of more dims, such as saved logits, do
    not count: they are many times the tokens, and checkpoints know them by their fingerprint.
    """
    sample = rows[OF_ROWS].astype(np.uint32)
    names = sorted(
        name for name, x in rows.items() if name != OF_ROWS and x.ndim <= sample.ndim + 1
    )
    length = max(rows[name].shape[-1] for name in names if rows[name].ndim > sample.ndim)
    totals: list[Any] = [[], []]
    for number, name in enumerate(names):
        x = rows[name]
        position = np.zeros((1,), np.uint32)
        if x.ndim > sample.ndim:
            times = np.arange(x.shape[-1]) if order is None else np.asarray(order)
            position = times.astype(np.uint32)
        else:
            x = x[..., None]
        place = sample[..., None] * np.uint32(length) + position
        index = place * np.uint32(len(names)) + np.uint32(number)
        for at, factors in enumerate(FACTORS):
            terms = mixed(_bits(x, xp), index, *(np.uint32(factor) for factor in factors))
            totals[at].append(xp.sum(terms, dtype=np.uint32))
    # Arrays, because numpy warns of a sum of scalars that passes 2^32, which is meant here.
    return [xp.sum(xp.stack(terms_of_all), dtype=np.uint32) for terms_of_all in totals]


def _bits(x: Any, xp: Any) -> Any:
    assert x.dtype.itemsize == 4, f"an entry of a batch has 32 bits, not {x.dtype}"
    if xp is np:
        return np.ascontiguousarray(x).view(np.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
