"""Finds the kind of each parameter, and how its learning rate follows the width of the model.

*Matrices* are tensors with two or more dims (per layer and expert) that are not biases, nor the
taps of a convolution by channel. Their logical axes tell which of their sides grow with the model:
a dim without a logical axis has the same size in every width, and so have the rows of tables. Dims
stand in the order in which a matrix is multiplied: those that are summed over first.

The rates are those of muP with AdamW in Table 8 of arXiv:2203.03466, where the logits are divided
by the width factor (`model.logit_factor`). They hold for Lion too, whose updates have the size of
a sign.
"""

from typing import Literal

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import Muon, OptimizerConfig
from spmdtrain.models.abstract import Parameter

# Dims of the tables that are read row by row: their updates are not those of a matrix.
TABLE_AXES = ("vocab", "position")
# table: embedding, head, positions; hidden: from one width to another; readout: from the width to
# a fixed number, such as a router; input: from a fixed number to the width; vector: norms, biases,
# taps.
Kind = Literal["table", "hidden", "readout", "input", "vector"]


def is_matrix(path: str, parameter: Parameter) -> bool:
    """Returns True if it has at least two dims per layer, and is neither a bias nor taps."""
    name = path.rsplit(".", 1)[-1]
    is_vector = "bias" in name or name.startswith("taps")
    return len(parameter.shape) - parameter.apart >= 2 and not is_vector


def stream_dim(parameter: Parameter) -> int:
    """Returns the dim of a matrix, from 0, that is the residual stream; 0 if none is.

    A tensor with more dims is the matrix from the stream to all the others, or back.
    """
    axes = parameter.axes[parameter.apart :]
    return axes.index("embed") if "embed" in axes else 0


def is_table(parameter: Parameter) -> bool:
    """Returns True if it is read row by row, by the id of a token or its position."""
    return not set(parameter.axes).isdisjoint(TABLE_AXES)


def kind_of(path: str, parameter: Parameter) -> Kind:
    """Returns the kind of a parameter. Raises ConfigError if no dim of a matrix has an axis."""
    if not is_matrix(path, parameter):
        return "vector"
    if is_table(parameter):
        return "table"
    axes = parameter.axes[parameter.apart :]
    if not any(axes):
        raise ConfigError(
            f"model.mup_base: no dim of {path} has a logical axis, so nothing says which of them "
            "grow with the width",
            fix='e.g. out_sharding=("embed", "ffn"); or model.mup_base=none',
        )
    # The stream is one side of a matrix, first or last, and all other dims are the other side.
    rows = len(axes) - 1 if axes[-1] == "embed" else 1
    if any(axes[:rows]) and any(axes[rows:]):
        return "hidden"
    return "readout" if any(axes[:rows]) else "input"


def width_rate(config: OptimizerConfig, path: str, parameter: Parameter, factor: float) -> float:
    """Returns the factor of the learning rate in a model `factor` times wider than its base.

    The orthogonal updates of Muon, scaled to those of AdamW by the root of the larger dim
    (arXiv:2502.16982), grow with the root of the width in their spectral norm, and may not grow at
    all between two widths.
    """
    kind = kind_of(path, parameter)
    if kind == "hidden":
        return factor**-0.5 if isinstance(config, Muon) else 1 / factor
    return 1 / factor if kind == "readout" else 1.0
