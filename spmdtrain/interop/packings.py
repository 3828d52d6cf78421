"""Opens the weight files of a published model, by how its matrices are packed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmdtrain.config.published.quantisation import SCALED
from spmdtrain.config.published.read_config import Published
from spmdtrain.interop import scaled_matrices
from spmdtrain.interop.names.model_table import Table, in_mxfp4
from spmdtrain.interop.safetensors_files import DTYPES, Tensor, open_tensors

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Unpacking:
    """The way to read matrices in a quantised format.

    `kinds`: the types of numbers that its files hold, by the name there. `unpacked(tensors)` joins
    those of one matrix, and `table(table)` says which tensors our parameters are made of.
    """

    kinds: Mapping[str, Any]
    unpacked: Callable[[Tensors], Tensors] = lambda tensors: tensors
    table: Callable[[Table], Table] = lambda table: table


# By `Published.packing`.
UNPACKINGS = {
    "": Unpacking(DTYPES),
    SCALED: Unpacking(DTYPES | scaled_matrices.KINDS, unpacked=scaled_matrices.with_scales),
    "mxfp4": Unpacking(DTYPES, table=in_mxfp4),
}


def open_published(published: Published) -> Tensors:
    """Returns the tensors of a published model, by name. Raises CheckpointError if a file is
    missing or damaged, or a matrix lacks its scales.
    """
    packing = UNPACKINGS[published.packing]
    return packing.unpacked(open_tensors(published.folder, packing.kinds))
