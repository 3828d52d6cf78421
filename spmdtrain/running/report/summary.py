"""RUN/summary.json: predicted, compiled and measured figures side by side, when a run ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from spmdtrain.compiled.step_memory import memory_in

COLUMNS = ("measured", "compiled", "predicted")


@dataclass(frozen=True)
class Prediction:
    """The expected cost of a run. `memory_bytes` is that of the fullest device.

    `seconds` and `bytes` break the figures down by the planner's names; `bounds` says what bounds
    each of the seconds.
    """

    hardware: str  # that the figures hold for
    step_seconds: float
    memory_bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Returns the values of predicted.json."""
        return {
            "hardware": self.hardware,
            "step_seconds": self.step_seconds,
            "breakdown_seconds": dict(self.seconds),
            "bound_by": dict(self.bounds),
            "memory_bytes": dict(self.bytes),
        }


def figures(
    prediction: Prediction | None,
    compiled: dict[str, Any],
    step_seconds: float | None,
    peak_bytes: int | None,
) -> dict[str, Any]:
    """Returns the values of summary.json.

    `compiled` is the report in compiled.json, which has no times. `step_seconds` and `peak_bytes`
    were measured, or are None. `error` is predicted / measured - 1, with the compiled figure if
    nothing was measured.
    """
    held = memory_in(compiled).held
    return {
        "hardware": prediction and prediction.hardware,
        "step_seconds": _beside(prediction and prediction.step_seconds, None, step_seconds),
        "memory_bytes": _beside(prediction and prediction.memory_bytes, held, peak_bytes),
    }


def _beside(
    predicted: float | None, compiled: float | None, measured: float | None
) -> dict[str, float | None]:
    truth = measured or compiled
    error = predicted / truth - 1 if predicted is not None and truth else None
    return {"predicted": predicted, "compiled": compiled, "measured": measured, "error": error}


def peak_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """Returns the most bytes that the allocator of any device of this process has held so far.

    None if no device can tell, as on a CPU.
    """
    devices = [device for device in mesh.local_devices if device.platform != "cpu"]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def show(values: dict[str, Any]) -> str:
    """Formats the values of `figures` as one line for the time and one for the memory.

    Unknown values are left out, or said to be unknown.
    """
    hardware = values["hardware"]
    return "\n".join(
        [
            f"median step time   {_said(values['step_seconds'], _seconds, hardware)}",
            f"memory per device  {_said(values['memory_bytes'], _size, hardware)}",
        ]
    )


def _said(
    figures: dict[str, float | None], say: Callable[[float], str], hardware: str | None
) -> str:
    measured, compiled, predicted = (figures[name] for name in COLUMNS)
    parts = []
    if measured:
        parts.append(f"{say(measured)} measured")
    if compiled:
        parts.append(f"{say(compiled)} by the compiler's account")
    if not parts:
        parts.append("not known: the first step is not typical")
    if predicted is not None:
        error = "" if figures["error"] is None else f" ({figures['error']:+.1%})"
        parts.append(f"{say(predicted)} predicted for {hardware}{error}")
    return ", ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


def _size(count: float) -> str:
    return f"{count / 1e9:.4g} GB" if count >= 1e9 else f"{count / 1e6:.4g} MB"
