"""How gradients cross the data axis: one sum per step, or one scatter (ZeRO-1).

Called inside the manual region over `data`, after all microbatches, on gradients that each data shard has summed on
its own.
"""

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec as P


def scatter_dim(shape: Sequence[int], spec: P, data: int) -> int | None:
    """The dim of a gradient that ZeRO-1 splits over `data` devices; None: too small or too odd, it stays whole.

    Dims that no mesh axis splits yet come first (largest first): scattering one that is split moves more data.
    """
    parts = [*spec, *[None] * (len(shape) - len(spec))]
    whole = [dim for dim, size in enumerate(shape) if parts[dim] is None and size % data == 0 and size]
    return max(whole, key=lambda dim: shape[dim], default=None)


def scattered_spec(spec: P, dim: int | None) -> P:
    """`spec` with `data` splitting `dim` as well."""
    if dim is None:
        return spec
    parts = [*spec, *[None] * (dim + 1 - len(spec))]
    parts[dim] = "data"
    return P(*parts)


def summed(tree, data: int):
    """Sums every leaf over the `data` devices. One device: nothing to sum, and XLA refuses a group of one here."""
    return jax.lax.psum(tree, "data") if data > 1 else tree


def reduced(gradients: Mapping[str, jax.Array], dims: Mapping[str, int | None], data: int) -> dict[str, jax.Array]:
    """Gradients summed over `data`. Leaves with a dim in `dims` come back as this shard's slice of the sum."""
    whole = summed({path: leaf for path, leaf in gradients.items() if dims[path] is None}, data)
    slices = {
        path: jax.lax.psum_scatter(leaf, "data", scatter_dimension=dims[path], tiled=True)
        for path, leaf in gradients.items()
        if dims[path] is not None
    }
    return whole | slices
