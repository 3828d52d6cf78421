"""The keys and values of earlier tokens, for sampling."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values seen so far, of one layer or with a leading layer dim.

    The first `length` of the s places are filled.
    """

    k_bskd: jax.Array
    v_bskd: jax.Array
    length: jax.Array

    def extended(self, k_btkd: jax.Array, v_btkd: jax.Array) -> "Cache":
        start = (0, self.length, 0, 0)
        put = jax.lax.dynamic_update_slice
        k_bskd = put(self.k_bskd, k_btkd, start)
        v_bskd = put(self.v_bskd, v_btkd, start)
        return Cache(k_bskd, v_bskd, self.length + k_btkd.shape[1])
