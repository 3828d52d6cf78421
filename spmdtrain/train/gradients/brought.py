"""Passes arrays of parts into the region where gradients are computed, and results back."""

from collections.abc import Collection, Mapping
from typing import Any

import jax

from spmdtrain.models.abstract import Scaling
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.gradients.reduction import OverData
from spmdtrain.train.part import Parts, Reading, Slots, SumOverData
from spmdtrain.train.setup import Setup


class Brought:
    """The arrays that the parts of a run read beside its weights, by the name of the part."""

    def __init__(self, setup: Setup, parts: Parts):
        self._readings: dict[str, Reading] = {}
        self._sums: dict[str, SumOverData] = {}
        self._slots: dict[str, Slots] = {}
        for part in parts:
            reading = part.make_reading(setup) if part.make_reading else None
            if reading is None:
                continue
            self._readings[part.name] = reading
            if reading.data_sum:
                self._sums[part.name] = reading.data_sum
            if reading.slots:
                self._slots[part.name] = reading.slots

    def arrays(self, params: dict[str, jax.Array], inputs: StepInputs) -> dict[str, Any]:
        """Returns the arrays of the parts that have any, but for `of_slots`; outside the region."""
        return self._read(self._readings.keys() - self._slots.keys(), params, inputs)

    def of_slots(self, params: dict[str, jax.Array], inputs: StepInputs) -> dict[str, Any]:
        """Returns the arrays of the parts that have slots, outside the region."""
        return self._read(self._slots, params, inputs)

    def _read(
        self, names: Collection[str], params: dict[str, jax.Array], inputs: StepInputs
    ) -> dict[str, Any]:
        parts = {name: part for name, part in self._readings.items() if name in names}
        arrays = {name: part.arrays(params, inputs) for name, part in parts.items()}
        return {name: brought for name, brought in arrays.items() if brought is not None}

    def specs(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the specs of `arrays` at the border of the region."""
        return {name: self._readings[name].specs for name in arrays}

    def in_use(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the hooks of parts read in each microbatch, inside the region."""
        makers = {name: self._readings[name].in_use for name in arrays}
        return {name: make(arrays[name]) for name, make in makers.items() if make}

    def over_data(self, arrays: Mapping[str, Any], step: jax.Array) -> OverData | None:
        """Returns the sum over `data` that a part has, inside the region; at most one has any."""
        names = self._sums.keys() & arrays.keys()
        if not names:
            return None
        (name,) = names
        own, data_sum = arrays[name], self._sums[name]
        return OverData(data_sum.paths(own), lambda means: data_sum.sums(means, own, step))

    def slots(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the slots of each part that has any, given `of_slots`; inside the region."""
        return {name: self._slots[name].zeros(own) for name, own in arrays.items()}

    def scaling(self, arrays: Mapping[str, Any], slots: Mapping[str, Any]) -> Scaling:
        """Returns what the model is bound to, given `of_slots` and their slots."""
        of_parts = [self._slots[name].scaling(own, slots[name]) for name, own in arrays.items()]
        return {path: of_weight for part in of_parts for path, of_weight in part.items()}

    def seen(self, slots: Mapping[str, Any], cotangent: jax.Array | None) -> dict[str, Any]:
        """Returns the new items of parts, by name, from what slots hold after all microbatches."""
        made: dict[str, Any] = {}
        for name, of_part in slots.items():
            made |= self._slots[name].seen(of_part, cotangent)
        return made

    def made_specs(self, specs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the specs of the new items that `over_data` makes: those of what was brought."""
        for name in self._sums.keys() & specs.keys():
            return specs[name]
        return {}
