"""`biased_heads` and `biased_gelu`: a bias fused with the next operation, for its gradient.

The gradient of a bias is a sum over all tokens. XLA fuses it with the pass that makes the gradient
of the biased array, and then takes up to twice as long as one kernel does: 0.18 and 0.10 ms for the
heads of 32 x 1024 tokens of GPT-2 124M on an H200. The forward pass is left to XLA, which adds the
bias in the epilogue of the matmul before it.

Letters: b batch, t time, k key-value heads, g query heads of each, n = g + 2 slots of each (its
queries, its key, its value), d head dim, f hidden.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_arrays, check_floating
from pallas_kernels.bias import triton, xla
from pallas_kernels.choose import INTERPRET, Refused
from pallas_kernels.partition import refuse_checked_vma

IMPLEMENTATIONS = {"triton": triton, "xla": xla}


def biased_heads(
    products_btknd: jax.Array, bias_knd: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds a bias to queries, keys and values, and takes them apart.

    Args:
      products_btknd: [batch, time, key-value heads, slots, head dim]; of the slots of a head the
        last is its value, the one before its key, the others its queries.
      bias_knd: [key-value heads, slots, head dim]. Its gradient is summed in float32.
      implementation: "triton" or "xla", for the backward pass; None takes the first that can.

    Returns:
      Queries [b, t, k, slots - 2, d], keys and values [b, t, k, d], in the dtype of the products.

    Raises:
      ValueError: the shapes do not fit together, or there is no such implementation.
      Refused: the named implementation cannot run this call.
    """
    op = "biased_heads"
    check_arrays(op, products=products_btknd, bias=bias_knd)
    check_floating(op, "products", products_btknd)
    check_floating(op, "bias", bias_knd)
    refuse_checked_vma(op, products_btknd, bias_knd)
    shape = products_btknd.shape
    if len(shape) != 5 or shape[2:] != bias_knd.shape or shape[3] < 3:
        raise ValueError(
            f"{op}: products {shape} and bias {bias_knd.shape} are not "
            "[batch, time, heads, 3 or more slots, head dim] and [heads, slots, head dim]"
        )
    return _heads(_chosen(op, shape, implementation), products_btknd, bias_knd)


def biased_gelu(
    products: jax.Array, bias_f: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Computes the GELU (arXiv:1606.08415), in its tanh form, of products + bias.

    The backward pass computes it again from the biased products.

    Args:
      products: [..., f].
      bias_f: [f]. Its gradient is summed in float32.
      implementation: as in `biased_heads`.

    Raises:
      ValueError: as `biased_heads`.
    """
    op = "biased_gelu"
    check_arrays(op, products=products, bias=bias_f)
    check_floating(op, "products", products)
    check_floating(op, "bias", bias_f)
    refuse_checked_vma(op, products, bias_f)
    if products.ndim < 2 or products.shape[-1:] != bias_f.shape:
        raise ValueError(
            f"{op}: products {products.shape} and bias {bias_f.shape} are not [..., f] and [f]"
        )
    return _gelu(_chosen(op, products.shape, implementation), products, bias_f)


def add_vector(products_btknd: jax.Array, bias_knd: jax.Array) -> jax.Array:
    """Returns products + bias, in the dtype of the products.

    The bias is added as a vector: XLA would write one of several dims out for each token.
    """
    wide = products_btknd.reshape(*products_btknd.shape[:2], -1) + bias_knd.reshape(-1)
    return wide.reshape(products_btknd.shape).astype(products_btknd.dtype)


def heads_apart(joined_btknd: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [b, t, k, n - 2, d], keys and values [b, t, k, d]."""
    return joined_btknd[..., :-2, :], joined_btknd[..., -2, :], joined_btknd[..., -1, :]


def _chosen(op: str, shape: tuple[int, ...], requested: str | None) -> str:
    if requested is None:
        return "xla" if triton.refusal(shape, False) else "triton"
    plain = requested.removesuffix(INTERPRET)
    if plain not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"{op}: no implementation {requested!r}; there are {names}")
    if plain == "triton" and (reason := triton.refusal(shape, requested != plain)):
        message = f"{op}: implementation {requested!r} refuses: {reason}; try implementation=None"
        raise Refused(reason, message)
    return requested


def _implementation(name: str):
    return IMPLEMENTATIONS[name.removesuffix(INTERPRET)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _heads(_name: str, products_btknd, bias_knd):
    return heads_apart(add_vector(products_btknd, bias_knd))


def _heads_forward(name, products_btknd, bias_knd):
    return _heads(name, products_btknd, bias_knd), jnp.zeros((0,), bias_knd.dtype)


def _heads_backward(name, like_bias, gradients):
    dproducts, dbias = _implementation(name).joined(*gradients, name)
    return dproducts, dbias.astype(like_bias.dtype)


_heads.defvjp(_heads_forward, _heads_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gelu(name: str, products, bias_f):
    return _implementation(name).gelu((products + bias_f).astype(products.dtype))


def _gelu_forward(name, products, bias_f):
    biased = (products + bias_f).astype(products.dtype)
    return _implementation(name).gelu(biased), (biased, jnp.zeros((0,), bias_f.dtype))


def _gelu_backward(name, residuals, gradient):
    biased, like_bias = residuals
    dproducts, dbias = _implementation(name).gelu_gradient(biased, gradient, name)
    return dproducts, dbias.astype(like_bias.dtype)


_gelu.defvjp(_gelu_forward, _gelu_backward)
