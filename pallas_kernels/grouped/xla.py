"""Implements the grouped matmul in plain JAX: a scan over tiles, forward and for either gradient.

Its memory is that of one tile and one expert: unlike in XLA's own expansion of `jax.lax.ragged_dot`
on CUDA, neither rows nor weights are copied for each. A tile without an expert is multiplied as
zeros.

Letters: r rows, t tiles, i rows of a tile, k contracted, n result, x experts.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.calls import GroupedCall
from pallas_kernels.choose import not_interpretable
from pallas_kernels.grouped.tiles import order_by_expert
from pallas_kernels.wide import wide_dtype


def refusal(call: GroupedCall, interpreted: bool) -> str:  # noqa: ARG001
    return not_interpretable(interpreted)


def multiply(x_rk, w_xkn, expert_t, transposed: bool, name: str):  # noqa: ARG001
    """Returns each tile of x times its expert's weight [r, n].

    `transposed`: w is [x, n, k], as for the gradient of x.
    """
    x_tik = _tiles(x_rk, expert_t)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def step(_, tile):
        x_ik, expert = tile
        y_in = jax.lax.dot_general(
            _used(x_ik, expert),
            w_xkn[jnp.maximum(expert, 0)],
            contracted,
            preferred_element_type=wide_dtype(x_ik),
        )
        return None, y_in.astype(x_ik.dtype)

    _, y_tin = jax.lax.scan(step, None, (x_tik, expert_t))
    return y_tin.reshape(x_rk.shape[0], -1)


def weights_gradient(x_rk, dy_rn, expert_t, experts: int, name: str):  # noqa: ARG001
    """Returns the sum over each expert's tiles of x^T dy [x, k, n], in the dtype of x.

    Tiles go in the order of their experts, so only one expert's sum is wide at a time. It is
    rounded to its place after each tile; the last rounding counts.
    """
    x_tik = _tiles(x_rk, expert_t)
    dy_tin = _tiles(dy_rn, expert_t)
    wide = wide_dtype(x_rk)
    last = jnp.maximum(expert_t.max(), 0)  # of those with tiles: unused ones add zeros to it

    def step(carry, tile):
        sum_kn, before, dw_xkn = carry
        product_kn = jax.lax.dot_general(
            _used(x_tik[tile], expert_t[tile]),
            _used(dy_tin[tile], expert_t[tile]),
            (((0,), (0,)), ((), ())),
            preferred_element_type=wide,
        )
        expert = jnp.where(expert_t[tile] >= 0, expert_t[tile], last)
        sum_kn = jnp.where(expert == before, sum_kn, 0) + product_kn
        return (sum_kn, expert, dw_xkn.at[expert].set(sum_kn.astype(dw_xkn.dtype))), None

    shape = (x_rk.shape[1], dy_rn.shape[1])
    start = (jnp.zeros(shape, wide), jnp.int32(-1), jnp.zeros((experts, *shape), x_rk.dtype))
    return jax.lax.scan(step, start, order_by_expert(expert_t, experts))[0][2]


def _tiles(x_rk, expert_t):
    return x_rk.reshape(expert_t.shape[0], -1, x_rk.shape[1])


def _used(x, expert):
    return jnp.where(expert >= 0, x, 0)
