"""Arrays of a model that are not trained."""

from flax import nnx


class Buffer(nnx.Variable):
    """Numbers of a model that are not trained: random features, a fixed table.

    It is made as a parameter is, `Buffer(x, out_sharding=("embed", "ffn"))`, and lies on the mesh,
    in checkpoints and in memory as one; optimizers pass it over, and it has no moments. Its values
    are those that the model was made with, floating, for good: a forward pass cannot change them.
    """
