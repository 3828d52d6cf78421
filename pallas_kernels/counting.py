"""Counts the FLOPs of our kernels in programs that call them.

What a kernel computes cannot be read off its own program: an implementation may skip tiles, or
compute some twice. Inside `counted()` a kernel is traced as a mark with its FLOPs instead, which
counts like any other operation of the program, even inside scans. The values are zeros.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

MARK = "flops="
_is_counted: ContextVar[bool] = ContextVar("counted", default=False)
_share: ContextVar[float] = ContextVar("share", default=1.0)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Traces kernels inside it as marks."""
    before = _is_counted.set(True)
    try:
        yield
    finally:
        _is_counted.reset(before)


@contextlib.contextmanager
def share_counted(share: float) -> Iterator[None]:
    """Gives marks inside it this share of their FLOPs, for code that only some layers run."""
    before = _share.set(_share.get() * share)
    try:
        yield
    finally:
        _share.reset(before)


def is_counted() -> bool:
    """Returns True inside `counted()`, where kernels are traced as marks."""
    return _is_counted.get()


def marked(shape: tuple[int, ...], dtype: jnp.dtype, flops: float) -> jax.Array:
    """Returns zeros instead of the result of a kernel of `flops`."""
    return checkpoint_name(jnp.zeros(shape, dtype), f"{MARK}{flops * _share.get()!r}")


def flops_of_mark(name: str) -> float:
    """Returns the FLOPs of an operation `name` with this name; 0 if it is not a mark."""
    return float(name.removeprefix(MARK)) if name.startswith(MARK) else 0.0


def seen_pairs(
    queries: int, keys: int, causal: bool, window: tuple[int | None, int | None] | None
) -> float:
    """Counts the pairs of a query and a key that it sees, in one sequence without segments.

    Causal attention without a window counts half of its square, as in papers.
    """
    left, right = window or (None, None)
    if left is None and right is None:
        return queries * (keys - queries / 2) if causal else float(queries * keys)
    place = np.arange(queries) + keys - queries
    last = place if causal else place + (keys if right is None else right)
    first = np.zeros_like(place) if left is None else np.maximum(place - left, 0)
    counts = np.minimum(last, keys - 1) - first + 1
    return float(np.maximum(counts, 0).sum())
