"""The matmuls of a layer whose weights are split over `tensor` (arXiv:1909.08053, section 3).

`column_parallel` goes from the residual stream to heads or ffn, which `tensor` splits;
`row_parallel` goes back, and sums over `tensor`. Where `tensor` splits the tokens of the stream too
(sequence parallelism, arXiv:2205.05198), the first gathers tokens and the second scatters its sum:
around the matmul, or with `mesh.collective_matmul` beside it.

b: sequences, t: tokens, e: width of the stream, f: the dims of heads or ffn.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.partition import axes_of
from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.axes import STREAM, Rules
from spmdtrain.parallel.collective_matmul import Ring, gather_matmul, matmul_scatter
from spmdtrain.parallel.specs import axes_of_dim

Names = Sequence[str | None]  # the logical axes of f
# (x, weight, names) -> its product
TensorMatmul = Callable[[jax.Array, jax.Array, Names], jax.Array]
FindRing = Callable[[tuple[int, ...], tuple[int, ...], Names], Ring | None]


def make_column_parallel(
    constrain: Callable[..., jax.Array], find_ring: FindRing, *, gathers_again: bool
) -> TensorMatmul:
    """`column_parallel(x [b, t, e], weight [e, *f], names of f) -> [b, t, *f]`.

    `gathers_again`: where tokens are gathered, a device keeps its own ones for the backward pass
    and gathers again there (arXiv:2205.05198, section 4.2.2).
    """

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tensordot(constrain(x, "batch", "time", "embed"), weight, 1)

    if gathers_again:
        multiply = jax.checkpoint(multiply, prevent_cse=False)

    def column_parallel(x: jax.Array, weight: jax.Array, names: Names) -> jax.Array:
        ring = find_ring(x.shape, (*x.shape[:2], *weight.shape[1:]), names)
        return multiply(x, weight) if ring is None else gather_matmul(x, weight, ring)

    return column_parallel


def make_row_parallel(constrain: Callable[..., jax.Array], find_ring: FindRing) -> TensorMatmul:
    """`row_parallel(h [b, t, *f], weight [*f, e], names of f) -> [b, t, e]`."""

    def row_parallel(h: jax.Array, weight: jax.Array, names: Names) -> jax.Array:
        ring = find_ring((*h.shape[:2], weight.shape[-1]), h.shape, names)
        if ring is not None:
            return matmul_scatter(h, weight, ring)
        return constrain(jnp.tensordot(h, weight, weight.ndim - 1), *STREAM)

    return row_parallel


def stream_is_split(rules: Rules) -> bool:
    """True if more mesh axes split the residual stream than split the tokens of attention."""
    split = rules.activation_spec(("stream_time",), (0,))
    return split != rules.activation_spec(("time",), (0,))


def check_collective_matmul(rules: Rules) -> None:
    """Refuse `mesh.collective_matmul` where `tensor` has devices and no tokens of the stream."""
    if rules.sizes["tensor"] > 1 and not _stream_adds_tensor(rules):
        raise ConfigError(
            "mesh.collective_matmul: mesh axis 'tensor' splits no tokens of the residual stream, "
            "so that no matmul gathers or scatters them",
            fix="--set rules.activations.stream_time=context,tensor",
        )


def _stream_adds_tensor(rules: Rules) -> bool:
    (stream,) = rules.activation_spec(("stream_time",), (0,))
    (time,) = rules.activation_spec(("time",), (0,))
    return axes_of_dim(stream) == (*axes_of_dim(time), "tensor")


def make_find_ring(rules: Rules, manual: Sequence[str] = ()) -> FindRing:
    """`find_ring(shape of x [b, t, e], shape of h [b, t, *f], names of f)`: the ring of a
    collective matmul between them.

    None where `tensor` does not split both the tokens of x and one dim of f, or another axis
    stands between them. `manual`: the manual axes of the region around it.
    """

    def find_ring(
        stream_shape: tuple[int, ...], wide_shape: tuple[int, ...], names: Names
    ) -> Ring | None:
        stream = rules.activation_spec(STREAM, stream_shape, drop=manual)
        wide = rules.activation_spec(("batch", "time", *names), wide_shape, drop=manual)
        gathered = axes_of_dim(stream[1]) == (*axes_of_dim(wide[1]), "tensor")
        between = axes_of(stream) ^ axes_of(wide)
        if gathered and "tensor" in axes_of(wide) and not between:
            return Ring("tensor", stream, wide)
        return None

    return find_ring


def no_ring(stream_shape: tuple[int, ...], wide_shape: tuple[int, ...], names: Names) -> None:
    """A `find_ring` of collectives around the matmuls."""
