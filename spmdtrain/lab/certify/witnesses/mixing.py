"""Checks whether the samples of a microbatch are trained on independently of each other.

Layouts decide which samples share a microbatch on a device. A model that couples samples, as a mean
over the batch does, computes something different under each split of the batch.
"""

from collections.abc import Sequence

from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.noise import Reference
from spmdtrain.lab.certify.witnesses.witness import Witness

APART = "a sample does not depend on the others in its batch"


def samples_apart(reference: Reference, layouts: Sequence[Layout]) -> Witness:
    """Returns the witness that the model does not mix the samples of a batch.

    A model that does is refused if one of these layouts splits the batch; layouts that do not may
    still agree with one device.
    """
    if not reference.mixes_samples:
        return Witness(APART, True)
    details = (
        f"the model mixes the samples of a batch: in {reference.cut} microbatches, "
        f"{reference.mixed[0]}. "
        "Over data, fsdp or expert, and in microbatches, it is another model than on one device"
    )
    cut = any(layout.cuts_batch for layout in layouts)
    return Witness(APART, False if cut else None, details)
