"""Defines the seam between a layer and a matmul: a layer passes a weight, and the weight's type
multiplies.

`ctx.column_parallel(x, weight, names)` and `ctx.row_parallel` ask the weight: an array or a
`MatmulWeight` takes one matmul, a frozen weight with a low-rank update takes three, and an integer
weight scales the result. Layers need no change for this, nor do meshes, gathers or the pipeline,
which see the arrays that the weight consists of.

b: sequences, t: tokens, e: width of the stream, f: the dims of heads or ffn, r: a low rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import jax
from flax import nnx

from spmdtrain.config.schema import Narrow
from spmdtrain.parallel.tensor_matmul import Factor, Names, TensorMatmul


@dataclass(frozen=True)
class Product:
    """The matmul that a layer asks for, as passed to a weight's type.

    `names` are the logical axes of f. From the stream the matmul contracts e of x [b, t, e] with an
    array [e, *f]; back to it, f of x [b, t, *f] with an array [*f, e].
    """

    matmul: TensorMatmul
    names: Names
    from_stream: bool
    # dropout(x, site, rate): see ForwardContext.dropout
    dropout: Callable[[jax.Array, int, float], jax.Array] = lambda x, _site, _rate: x

    def __call__(
        self, x: jax.Array, array: jax.Array | Factor, *, narrow: Narrow | None = None
    ) -> jax.Array:
        """Returns the product of x and the array: [b, t, *f], or [b, t, e] back to the stream.

        `narrow`: the 8-bit floats in which it is multiplied (parallel/matmuls).
        """
        return self.matmul(x, array, self.names, narrow=narrow)

    @property
    def contracted(self) -> int:
        """The number of dims of an array that the matmul contracts."""
        return 1 if self.from_stream else len(self.names)

    def to_rank(self, x: jax.Array, array: jax.Array) -> jax.Array:
        """Returns the product [b, t, r] of x and an array [e, r], or [*f, r] back to the stream.

        No mesh axis splits r. Back to the stream, tokens are split like the stream's.
        """
        return self.matmul(x, array, (None,) if self.from_stream else self.names)


@runtime_checkable
class Weight(Protocol):
    """A weight that defines how it multiplies: a layer passes it to a matmul instead of an
    array.
    """

    def multiply(self, product: Product, x: jax.Array) -> jax.Array: ...


@dataclass(frozen=True)
class Fused:
    """Several matrices that one weight holds side by side along a dim, for a single matmul.

    It is metadata of a weight: `nnx.Param(x, out_sharding=axes, fused=Fused((64, 64, 128)))`. An
    optimizer that looks at whole matrices, such as Muon, then sees each of them by itself.
    """

    sizes: tuple[int, ...]  # along the dim, in their order
    dim: int = -1  # counted from the end: dims that stack layers come in front


class MatmulWeight(nnx.Param):
    """A weight that only `ctx.column_parallel` or `ctx.row_parallel` reads.

    In training on a mesh with `context` they get it as copies, one for each part of the tokens. The
    parts of its gradient are then summed once a step (`parallel/copies.py`). `narrow`: the 8-bit
    floats in which it is multiplied, if any; it is stored like any other weight.
    """

    narrow: ClassVar[Narrow | None] = None

    def multiply(self, product: Product, x: jax.Array) -> jax.Array:
        return product(x, self[...], narrow=self.narrow)


class FullPrecision(nnx.Param):
    """A small weight that is stored and computes in float32, whatever `[precision]` says."""


class LoadBias(FullPrecision):
    """The bias that is added to the scores of experts when a router chooses: one number for each.

    Its gradient is not a slope of the loss but the number of tokens that each expert had, divided
    by that of all tokens; see `router.py`.
    """


# The attribute with which a weight holds the weight that it stands for. Dotted paths leave it out.
WEIGHT = "adapted_weight"


def plain(path: tuple) -> tuple:
    """Returns the path of a variable without the steps from a weight to the one it stands for."""
    return tuple(step for step in path if step != WEIGHT)


def is_added(variable: nnx.Variable) -> bool:
    """Returns True for a variable that was added to a weight of the model (`is_added=True`)."""
    return variable.get_metadata().get("is_added", False)


def matmul_weights(model: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
    """Yields (dotted path, module, attribute) of each weight that only matmuls read.

    Weights of experts are left out: each row is multiplied by a different matrix.
    """
    for path, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if isinstance(value, MatmulWeight) and "experts" not in value.out_sharding:
                yield ".".join(map(str, (*path, name))), module, name


def multiply(weight: Weight | jax.Array, product: Product, x: jax.Array) -> jax.Array:
    """Returns the product by the weight's type; an array is multiplied directly."""
    if isinstance(weight, Weight):
        return weight.multiply(product, x)
    return product(x, weight[...])  # also for a plain nnx.Param
