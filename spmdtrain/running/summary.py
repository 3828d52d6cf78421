"""RUN/summary.json: what was predicted, compiled and measured, side by side, when a run ends."""

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Prediction:
    """The expected cost of a run. `memory_bytes` is that of the fullest device."""

    hardware: str  # that the figures are for
    step_seconds: float
    memory_bytes: int


def figures(
    prediction: Prediction | None,
    compiled: dict[str, Any],
    step_seconds: float | None,
    peak_bytes: int | None,
) -> dict[str, Any]:
    """The values of summary.json.

    `compiled` is the report of compiled.json; a compiler knows no time. `step_seconds` and
    `peak_bytes` were measured, or are None. `error` is predicted / measured - 1, or that of the
    compiled figure where nothing was measured.
    """
    held = held_bytes(compiled)
    return {
        "hardware": prediction and prediction.hardware,
        "step_seconds": _beside(prediction and prediction.step_seconds, None, step_seconds),
        "memory_bytes": _beside(prediction and prediction.memory_bytes, held, peak_bytes),
    }


def held_bytes(compiled: dict[str, Any]) -> int:
    """Bytes of a device while the step runs, by XLA's account; `compiled` as in compiled.json."""
    xla = compiled["memory"]
    return xla["argument_bytes"] + xla["output_bytes"] - xla["alias_bytes"] + xla["temp_bytes"]


def _beside(
    predicted: float | None, compiled: float | None, measured: float | None
) -> dict[str, float | None]:
    truth = measured or compiled
    error = predicted / truth - 1 if predicted is not None and truth else None
    return {"predicted": predicted, "compiled": compiled, "measured": measured, "error": error}


def peak_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """The most bytes that the allocator of a device of this process has held so far.

    None where no device can be asked, as on a CPU.
    """
    devices = [device for device in mesh.local_devices if device.platform != "cpu"]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def show(found: dict[str, Any]) -> str:
    """Formats the values of `figures` as text; without a prediction, without its column."""
    columns = (
        ["predicted", "compiled", "measured"] if found["hardware"] else ["compiled", "measured"]
    )
    of = f" (predicted for {found['hardware']})" if found["hardware"] else ""
    lines = [f"{'':<12}" + "".join(f"{column:>12}" for column in columns) + of]
    for name, said in (
        ("step_seconds", lambda seconds: f"{seconds:.4g} s"),
        ("memory_bytes", _size),
    ):
        figures = found[name]
        cells = [said(figures[column]) if figures[column] else "-" for column in columns]
        error = "" if figures["error"] is None else f"  {figures['error']:+.1%}"
        lines.append(
            f"{name.partition('_')[0]:<12}" + "".join(f"{cell:>12}" for cell in cells) + error
        )
    return "\n".join(lines)


def _size(count: float) -> str:
    return f"{count / 1e9:.4g} GB" if count >= 1e9 else f"{count / 1e6:.4g} MB"
