"""The record that a run keeps of its bad steps."""

from dataclasses import dataclass, field
from typing import Any

from spmdtrain.checkpoints.meta import Meta


@dataclass
class BadSteps:
    """The bad steps of a run, as its checkpoints keep them.

    `in_a_row`: consecutive steps skipped up to now; `left_out`: first and last global index of the
    samples left out by going back, in order. `returns`: how often the run has gone back to
    `returned_to`, and to no other checkpoint since; a resumed run starts this count again, because
    it repeats the same steps.
    """

    in_a_row: int = 0
    left_out: list[list[int]] = field(default_factory=list)
    returned_to: int | None = None
    returns: int = 0

    @classmethod
    def of(cls, meta: Meta) -> "BadSteps":
        """Reads the record of a checkpoint; empty if the checkpoint has none."""
        record = meta.get("guard", {})
        return cls(
            record.get("in_a_row", 0), [list(samples) for samples in record.get("left_out", [])]
        )

    def document(self) -> dict[str, Any]:
        """Returns the part of the record that a checkpoint keeps, as JSON values."""
        return {"in_a_row": self.in_a_row, "left_out": [list(samples) for samples in self.left_out]}

    def go_back(self, step: int, first: int, last: int) -> None:
        """Records that the run goes back to `step`, without the samples `first` to `last`."""
        self.in_a_row = 0
        self.left_out = [samples for samples in self.left_out if samples[1] < first] + [
            [first, last]
        ]
        self.returns = self.returns + 1 if step == self.returned_to else 1
        self.returned_to = step
