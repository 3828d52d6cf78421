"""Makes the matmuls of a layer whose weights are split over `tensor` (arXiv:1909.08053, section 3).

`column_parallel` goes from the residual stream to heads or ffn, which `tensor` splits;
`row_parallel` goes back, and sums over `tensor`. If `tensor` splits the tokens of the stream too
(sequence parallelism, arXiv:2205.05198), the first gathers tokens and the second scatters its sum:
around the matmul or, with `mesh.collective_matmul`, overlapped with it.

If `context` splits the tokens, a weight may come as copies, with one more leading dim than its
names say (`copies.py`).

b: sequences, t: tokens, e: width of the stream, f: the dims of heads or ffn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import Narrow, RunConfig
from spmdtrain.parallel.axes import STREAM, Rules, axes_of_dim
from spmdtrain.parallel.copies import Dot, multiply_copies

if TYPE_CHECKING:
    from spmdtrain.parallel.matmuls.collective_matmul import Ring
    from spmdtrain.parallel.matmuls.eight_bit_formats import Format
    from spmdtrain.parallel.matmuls.local_matmul import Parts

SAVED = "tensor_matmul"  # the checkpoint_name of a product, for remat "dots"

Names = Sequence[str | None]  # the logical axes of f
FindRing = Callable[[tuple[int, ...], tuple[int, ...], Names], "Ring | None"]
FindParts = Callable[[tuple[int, ...], Names], "Parts"]


@runtime_checkable
class Factor(Protocol):
    """A weight with a dot of its own, which depends on how devices split its arrays (`parts`)."""

    @property
    def weight(self) -> jax.Array: ...

    def of_copies(self) -> "Factor": ...
    def from_stream(self, parts: "Parts") -> Dot: ...
    def to_stream(self, parts: "Parts") -> Dot: ...


class TensorMatmul(Protocol):
    """A matmul between the residual stream and f. `narrow`: its 8-bit format, if it has one."""

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array | Factor,
        names: Names,
        /,
        *,
        narrow: Narrow | None = None,
    ) -> jax.Array: ...


def make_column_parallel(
    constrain: Callable[..., jax.Array],
    find_ring: FindRing,
    *,
    find_parts: FindParts | None = None,
    gathers_again: bool = False,
    copies: int = 1,
    local: bool = False,
) -> TensorMatmul:
    """Returns `column_parallel(x [b, t, e], weight [e, *f], names of f) -> [b, t, *f]`.

    `find_parts(shape of h [b, t, *f], names of f)`: see `Parts`; called only for dots that XLA does
    not partition. None: nothing splits the arrays.
    `gathers_again`: when tokens are gathered, a device keeps only its own for the backward pass,
    and gathers again there (arXiv:2205.05198, section 4.2.2).
    `copies`: the weight may also have that many copies, [copies, e, *f].
    `local`: no automatic mesh axis splits an array of the matmul.
    """

    find = find_parts or make_find_parts()

    def multiply(x: jax.Array, weight: Any, dot: Dot) -> jax.Array:
        return dot(constrain(x, "batch", "time", "embed"), weight, 1)

    def multiply_copied(x: jax.Array, weights: Any, dot: Dot) -> jax.Array:
        return multiply_copies(constrain(x, "batch", "time", "embed"), weights, 1, dot)

    if gathers_again:
        multiply = jax.checkpoint(multiply, prevent_cse=False, static_argnums=2)
        multiply_copied = jax.checkpoint(multiply_copied, prevent_cse=False, static_argnums=2)

    def column_parallel(
        x: jax.Array, factor: jax.Array | Factor, names: Names, *, narrow: Narrow | None = None
    ) -> jax.Array:
        weight = factor.weight if isinstance(factor, Factor) else factor
        has_copies = _has_copies(weight, names, copies)
        width = weight.shape[2:] if has_copies else weight.shape[1:]
        wide_shape = (*x.shape[:2], *width)
        if isinstance(factor, Factor):
            dot = factor.from_stream(find(wide_shape, names))
            if has_copies:
                return checkpoint_name(multiply_copied(x, factor.of_copies(), dot), SAVED)
            return checkpoint_name(multiply(x, factor, dot), SAVED)
        ring = find_ring(x.shape, wide_shape, names)
        if ring is not None:
            weights = weight if has_copies else ring.copy(weight)
            y = replace(ring, narrow=narrow).gather_matmul(x, weights)
            return checkpoint_name(y, SAVED)
        dot, in_parts = _dot(narrow, local)
        if in_parts:
            parts = find(wide_shape, names)
            weights = weight if has_copies else parts.copy(weight)
            return checkpoint_name(multiply(x, weights, parts.from_stream(dot)), SAVED)
        if has_copies:
            return checkpoint_name(multiply_copied(x, weight, dot), SAVED)
        return _saved(multiply(x, weight, dot), narrow)

    return column_parallel


def make_row_parallel(
    constrain: Callable[..., jax.Array],
    find_ring: FindRing,
    *,
    find_parts: FindParts | None = None,
    copies: int = 1,
    local: bool = False,
) -> TensorMatmul:
    """Returns `row_parallel(h [b, t, *f], weight [*f, e], names of f) -> [b, t, e]`.

    `find_parts`: as in `make_column_parallel`.
    `copies`: the weight may also have that many copies, [copies, *f, e].
    `local`: no automatic mesh axis splits an array of the matmul.
    """

    find = find_parts or make_find_parts()

    def row_parallel(
        h: jax.Array, factor: jax.Array | Factor, names: Names, *, narrow: Narrow | None = None
    ) -> jax.Array:
        weight = factor.weight if isinstance(factor, Factor) else factor
        has_copies = _has_copies(weight, names, copies)
        if isinstance(factor, Factor):
            dot = factor.to_stream(find(h.shape, names))
            if has_copies:
                y = multiply_copies(h, factor.of_copies(), weight.ndim - 2, dot)
            else:
                y = dot(h, factor, weight.ndim - 1)
            return checkpoint_name(constrain(y, *STREAM), SAVED)
        ring = find_ring((*h.shape[:2], weight.shape[-1]), h.shape, names)
        if ring is not None:
            weights = weight if has_copies else ring.copy(weight)
            y = replace(ring, narrow=narrow).matmul_scatter(h, weights)
            return checkpoint_name(y, SAVED)
        dot, in_parts = _dot(narrow, local)
        if in_parts:
            parts = find(h.shape, names)
            weights = weight if has_copies else parts.copy(weight)
            y = parts.to_stream(dot)(h, weights, len(names))
            return checkpoint_name(constrain(y, *STREAM), SAVED)
        if has_copies:
            y = constrain(multiply_copies(h, weight, weight.ndim - 2, dot), *STREAM)
            return checkpoint_name(y, SAVED)
        y = constrain(dot(h, weight, weight.ndim - 1), *STREAM)
        return _saved(y, narrow)

    return row_parallel


def _dot(narrow: Narrow | None, local: bool) -> tuple[Dot, bool]:
    """Returns the dot of a matmul, and whether each device has to call it on its own parts."""
    if narrow is None:
        return (local_tensordot if local else jnp.tensordot), False
    of_format = _format_of(narrow)
    return of_format.dot, of_format.in_parts


def _format_of(narrow: Narrow) -> "Format":
    from spmdtrain.parallel.matmuls.eight_bit_formats import format_of

    return format_of(narrow)


def local_tensordot(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """Returns `jnp.tensordot(x, weight, contracted)`, with the tokens of x as one dim.

    The gradient of the weight then sums over one dim, the tokens, not over sequences and times. For
    two dims XLA's CPU backend first writes a transposed copy of an operand, and then multiplies at
    a third of its speed (jax 0.10 and 0.12). A reshape costs nothing if no device holds a part of
    the dims that it joins. The weight keeps its shape: a reshaped one would be kept for the
    backward pass where remat gathers it again.
    """
    rows, inner = x.shape[: x.ndim - contracted], x.shape[x.ndim - contracted :]
    y = jnp.tensordot(x.reshape(math.prod(rows), *inner), weight, contracted)
    return y.reshape(*rows, *weight.shape[contracted:])


def _saved(y: jax.Array, narrow: Narrow | None) -> jax.Array:
    """Returns y, with a name for remat if it comes from a custom rule, which hides its dot."""
    return checkpoint_name(y, SAVED) if narrow is not None else y


def _has_copies(weight: jax.Array, names: Names, copies: int) -> bool:
    """Returns True if the weight is [c, e, *f] or [c, *f, e] rather than [e, *f] or [*f, e]."""
    return copies > 1 and weight.ndim == len(names) + 2


def stream_is_split(rules: Rules) -> bool:
    """Returns True if more mesh axes split the residual stream than the tokens of attention."""
    split = rules.activation_spec(("stream_time",), (0,))
    return split != rules.activation_spec(("time",), (0,))


def check_matmuls(config: RunConfig, rules: Rules, mesh: Mesh | AbstractMesh) -> None:
    """Refuses kinds of matmul that the devices or the rules do not allow."""
    if config.mesh.collective_matmul:
        _check_collective_matmul(rules)
    narrow = config.precision.matmul
    if isinstance(mesh, Mesh) and narrow != "compute":
        _format_of(narrow).check(mesh.devices.flat[0].device_kind)


def _check_collective_matmul(rules: Rules) -> None:
    """Refuses `mesh.collective_matmul` if `tensor` has devices but splits no stream tokens."""
    if rules.sizes["tensor"] > 1 and not _stream_adds_tensor(rules):
        raise ConfigError(
            "mesh.collective_matmul: mesh axis 'tensor' splits no tokens of the residual stream, "
            "so no matmul gathers or scatters them",
            fix="--set rules.activations.stream_time=context,tensor",
        )


def _stream_adds_tensor(rules: Rules) -> bool:
    (stream,) = rules.activation_spec(("stream_time",), (0,))
    (time,) = rules.activation_spec(("time",), (0,))
    return axes_of_dim(stream) == (*axes_of_dim(time), "tensor")


def make_find_ring(rules: Rules, manual: Sequence[str] = ()) -> FindRing:
    """Returns `find_ring(shape of x [b, t, e], shape of h [b, t, *f], names of f)`.

    It gives the ring of a collective matmul between x and h. None if `tensor` does not split both
    the tokens of x and one dim of f, or if another axis comes between them. `manual`: the manual
    axes of the surrounding region.
    """

    def find_ring(
        stream_shape: tuple[int, ...], wide_shape: tuple[int, ...], names: Names
    ) -> "Ring | None":
        from spmdtrain.parallel.matmuls.collective_matmul import Ring

        stream = rules.activation_spec(STREAM, stream_shape, drop=manual)
        wide = rules.activation_spec(("batch", "time", *names), wide_shape, drop=manual)
        gathered = axes_of_dim(stream[1]) == (*axes_of_dim(wide[1]), "tensor")
        between = axes_of(stream) ^ axes_of(wide)
        if gathered and "tensor" in axes_of(wide) and not between:
            return Ring(axis="tensor", stream=stream, wide=wide)
        return None

    return find_ring


def make_find_parts(rules: Rules | None = None, manual: Sequence[str] = ()) -> FindParts:
    """Returns `find_parts(shape of h [b, t, *f], names of f)`, by the rules of activations.

    `rules`: None if nothing splits the arrays. `manual`: the manual axes of the surrounding region.
    """

    def find_parts(wide_shape: tuple[int, ...], names: Names) -> "Parts":
        from spmdtrain.parallel.matmuls.local_matmul import Parts

        if rules is None:
            return Parts(wide=P(None, None))
        return Parts(wide=rules.activation_spec(("batch", "time", *names), wide_shape, drop=manual))

    return find_parts


def no_ring(stream_shape: tuple[int, ...], wide_shape: tuple[int, ...], names: Names) -> None:
    """Returns None: the `find_ring` that keeps collectives around the matmuls."""
