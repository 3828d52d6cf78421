"""Determines how a step computes its loss: the implementation, and the number of chunks."""

from functools import cache
from typing import NamedTuple

from pallas_kernels.calls import LossCall
from pallas_kernels.choose import VARIANT
from pallas_kernels.loss.api import VARIANTS, XLA, best_on
from pallas_kernels.loss.chunks import CHUNK_LOGITS, chunk_count
from pallas_kernels.tuning import Table
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.workload import Workload


class Loss(NamedTuple):
    """The loss of one microbatch on one device."""

    implementation: str  # of `linear_cross_entropy`, without the size of its chunks
    chunks: int


def loss_of(workload: Workload, ways: int) -> Loss:
    """Returns the loss of a run on the workload's GPU: the one measured as best, or the default.

    `ways` is the number of parts into which the rows of the vocabulary are split.
    """
    microbatch, time = workload.microbatch, workload.train.sequence_length // workload.mesh.context
    rows = -(-shape.vocab(workload.model) // ways)
    name = XLA
    if chunk_count(microbatch, time, rows, CHUNK_LOGITS) > 1:  # or there is nothing to choose
        call = LossCall(
            batch=microbatch,
            time=time,
            width=workload.model.embed,
            rows=rows,
            dtype=workload.dtype,
            weight=workload.dtype,
            logits=workload.config.precision.logits,
            whole=ways * workload.mesh.context == 1,
        )
        default = best_on(workload.device_kind)[0] if call.whole else XLA
        name = measured(workload.device_kind).get(call.name, default)
    implementation, _, size = name.partition(VARIANT)
    limit = int(CHUNK_LOGITS * VARIANTS.get(size, 1))
    return Loss(implementation, chunk_count(microbatch, time, rows, limit))


@cache
def measured(device_kind: str) -> dict[str, str]:
    """Returns class of a call -> the implementation that was measured as best on this GPU."""
    return Table().chosen(device_kind) if device_kind else {}
