"""The grouped matmul in plain JAX: a scan over tiles, forward and for either gradient.

Its memory is one tile's: neither rows nor weights are copied for each expert, as XLA's own
expansion of `jax.lax.ragged_dot` does on CUDA. A tile without an expert is multiplied as zeros.

Letters: r rows, t tiles, i rows of a tile, k contracted, n result, x experts.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.calls import GroupedCall
from pallas_kernels.choose import not_interpretable
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
    """Returns the sum over each expert's tiles of x^T dy [x, k, n], in the dtype of x."""
    wide = wide_dtype(x_rk)

    def step(dw_xkn, tile):
        x_ik, dy_in, expert = tile
        dw_kn = jax.lax.dot_general(
            _used(x_ik, expert),
            _used(dy_in, expert),
            (((0,), (0,)), ((), ())),
            preferred_element_type=wide,
        )
        return dw_xkn.at[jnp.maximum(expert, 0)].add(dw_kn), None

    start = jnp.zeros((experts, x_rk.shape[1], dy_rn.shape[1]), wide)
    tiles = (_tiles(x_rk, expert_t), _tiles(dy_rn, expert_t), expert_t)
    return jax.lax.scan(step, start, tiles)[0].astype(x_rk.dtype)


def _tiles(x_rk, expert_t):
    return x_rk.reshape(expert_t.shape[0], -1, x_rk.shape[1])


def _used(x, expert):
    return jnp.where(expert >= 0, x, 0)
