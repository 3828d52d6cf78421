"""Runs a computation in some steps only, where it is too expensive for all."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

T = TypeVar("T")


def rarely(change: Callable[[T], T]) -> Callable[[jax.Array, T], T]:
    """Returns a function of (due, x) that gives `change(x)` if `due` is true, and x otherwise.

    Under `jax.vmap` one decision holds for all of a stack: if any is due, all change. `lax.cond`
    alone would become a choice between two results there, both computed in every step.
    """

    @custom_vmap
    def call(due: jax.Array, x: T) -> T:
        return jax.lax.cond(due, change, lambda x: x, x)

    @call.def_vmap
    def of_stack(size: int, batched: list, due: jax.Array, x: T) -> tuple[T, T]:
        def stacked(leaf: jax.Array, is_batched: bool) -> jax.Array:
            return leaf if is_batched else jnp.broadcast_to(leaf, (size, *leaf.shape))

        any_due, parts = batched
        changed = rarely(jax.vmap(change))(
            jnp.any(due) if any_due else due, jax.tree.map(stacked, x, parts)
        )
        return changed, jax.tree.map(lambda _: True, changed)

    return call
