"""Serves recorded samples: the data of a bundle, whose corpus may be gone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.epochs import Endless


@dataclass(frozen=True)
class RecordedData:
    """Recorded samples, as rows whose global indices `rows["sample"]` ascend.

    `fingerprint` is that of the corpus.
    """

    rows: Mapping[str, np.ndarray]
    fingerprint: str
    tokenizer: None = None
    begin_of_text: None = None
    end_of_text: None = None
    template: None = None

    def train_samples(self, config: RunConfig) -> Callable[[np.ndarray], dict[str, np.ndarray]]:  # noqa: ARG002
        """Returns `samples(indices)`, which raises DataError for one that was not recorded."""
        recorded = self.rows["sample"]

        def samples(indices: np.ndarray) -> dict[str, np.ndarray]:
            wanted = np.asarray(indices).astype(np.uint32)
            places = np.minimum(np.searchsorted(recorded, wanted), len(recorded) - 1)
            missing = wanted[recorded[places] != wanted]
            if missing.size:
                raise DataError(
                    f"sample {missing[0]} was not recorded",
                    found=f"samples {recorded[0]} to {recorded[-1]}",
                )
            return {name: x[places] for name, x in self.rows.items()}

        return samples

    def samples_per_epoch(self, config: RunConfig) -> Endless:  # noqa: ARG002 - as in the other kinds
        return Endless("recorded samples, a part of an epoch")

    def eval_sets(self, config: RunConfig) -> list[Any]:  # noqa: ARG002 - as in the other kinds
        return []

    def describe(self, config: RunConfig) -> str:  # noqa: ARG002 - as in the other kinds
        return f"{len(self.rows['sample'])} recorded samples"
