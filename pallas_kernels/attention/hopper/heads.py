"""Finds heads in memory: queries, keys and values have an array each, or share one.

In a shared array [b, time, slots, d] each key-value head has `group` + 2 slots in a row: its
queries, its keys and its values, as one projection makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.attention.operands import pad_to
from pallas_kernels.attention.problem import Inputs


@dataclass(frozen=True)
class Heads:
    """The places of heads; static in a kernel."""

    queries: int  # heads of queries
    group: int  # of them to a key-value head
    joined: bool  # in one array

    @property
    def keys(self) -> int:
        """The number of key-value heads."""
        return self.queries // self.group

    def of_keys(self, head) -> Any:
        """Returns the key-value head of a query head."""
        return jax.lax.div(head, self.group)

    def query_slot(self, head) -> Any:
        return head + 2 * self.of_keys(head) if self.joined else head

    def key_slot(self, kv_head) -> Any:
        return kv_head * (self.group + 2) + self.group if self.joined else kv_head

    def value_slot(self, kv_head) -> Any:
        return self.key_slot(kv_head) + 1 if self.joined else kv_head

    def split_refs(self, refs: Sequence[Any]) -> tuple[Any, Any, Any, list[Any]]:
        """Returns the references to queries, keys and values, and those after them."""
        if self.joined:
            shared, *rest = refs
            return shared, shared, shared, rest
        q, k, v, *rest = refs
        return q, k, v, rest


def heads_of(inputs: Inputs, joined: bool) -> Heads:
    return Heads(inputs.q_bthd.shape[2], inputs.group, joined)


def shared_array(joined_btknd: jax.Array, length: int, width: int) -> jax.Array:
    """Returns the array that heads share, [b, time, slots, d], padded to `length` and `width`."""
    b, t, k, n, d = joined_btknd.shape
    return pad_to(joined_btknd.reshape(b, t, k * n, d), (b, length, k * n, width))
