"""Measures a step by the text that XLA compiles for an absent GPU: bytes, launches, memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.compiled import hlo
from spmdtrain.compiled.kernel_launches import Kernel, kernels


@dataclass(frozen=True)
class StepText:
    """The traffic, launches and memory of a step; sizes in GB.

    `hidden`: the share of the bytes sent over `data` that move beside work; None: nothing is sent.
    """

    moved: float
    launches: int
    temporaries: float
    copied: float  # by kernels that compute nothing
    copies: int
    converted: float  # by kernels that only turn floats of one width into another
    conversions: int
    hidden: float | None = None

    def lines(self) -> list[str]:
        """Returns one line a figure, "name: figure"."""
        return [
            f"bytes: {self.moved:,.1f} GB",
            f"launches: {self.launches:,}",
            f"temporaries: {1e3 * self.temporaries:,.0f} MB",
            f"copies: {self.copied:,.1f} GB in {self.copies:,} launches",
            f"conversions: {self.converted:,.1f} GB in {self.conversions:,} launches",
            *([] if self.hidden is None else [f"hidden over data: {self.hidden:.0%}"]),
        ]


@dataclass(frozen=True)
class Bounds:
    """The most that a step may move, launch and hold, and the least share that it must hide."""

    moved: float
    launches: int
    hidden: float
    temporaries: float = math.inf

    def broken_by(self, step: StepText) -> list[str]:
        """Returns one line for each bound that the step does not keep."""
        above = [
            f"{name}: {getattr(step, name):,.6g} is above {getattr(self, name):,.6g}"
            for name in ("moved", "launches", "temporaries")
            if getattr(step, name) > getattr(self, name)
        ]
        if step.hidden is None or step.hidden >= self.hidden:
            return above
        return [*above, f"hidden: {step.hidden:.0%} is below {self.hidden:.0%}"]


def step_text(compiled, mesh) -> StepText:
    """Returns the figures of a compiled step."""
    text = compiled.as_text()
    launched = kernels(text)
    moves = [each for each in launched if each.only_moves]
    converts = [each for each in launched if each.only_converts]
    return StepText(
        moved=_gigabytes(launched),
        launches=_launches(launched),
        temporaries=compiled.memory_analysis().temp_size_in_bytes / 1e9,
        copied=_gigabytes(moves),
        copies=_launches(moves),
        converted=_gigabytes(converts),
        conversions=_launches(converts),
        hidden=_hidden(text, dict(mesh.shape)),
    )


def _gigabytes(launched: Sequence[Kernel]) -> float:
    return sum(each.moved for each in launched) / 1e9


def _launches(launched: Sequence[Kernel]) -> int:
    return sum(each.launches for each in launched)


def _hidden(text: str, axes: dict[str, int]) -> float | None:
    over_data = [each for each in hlo.traffic(text, axes) if each["axis"] == "data"]
    sent = sum(each["sent"] for each in over_data)
    if not sent:
        return None
    return sum(each["sent_beside_work"] for each in over_data) / sent
