"""Reads the memory of a compiled step, by XLA's account."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class StepMemory:
    """The bytes on one device while a step runs; its fields are the keys of compiled.json."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # the part of the output that lives in donated arguments
    temp_bytes: int

    @property
    def held(self) -> int:
        """The bytes held at once; aliased arrays count once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def memory_of(compiled: jax.stages.Compiled) -> StepMemory:
    """Returns the memory of a compiled step."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "the backends of a run give one"
    return StepMemory(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
    )


def memory_in(report: Mapping[str, Any]) -> StepMemory:
    """Returns the memory that a report (compiled.json) holds."""
    return StepMemory(**report["memory"])
