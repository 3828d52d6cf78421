"""What a run tells: one JSON object per step, one per event, and the figures a person watches.

MFU (model FLOPs utilisation) = model FLOPs per token x tokens per second / (devices x peak). Model FLOPs: see
`models.size.train_flops_per_token` (causal attention counted half, recomputation not at all). Peak: dense bfloat16,
from pallas_kernels/gpus.py; on hardware that is not listed there MFU is null, never guessed.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import gpus
from spmdtrain.config.errors import StorageError


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device as jax names it; None where pallas_kernels/gpus.py does not list it."""
    gpu = gpus.find(device_kind)
    return None if gpu is None else gpu.bfloat16


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around file work on `path`: a full disk and the like become a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from None


class JsonLines:
    """Appends one object per line and flushes, so that a kill loses nothing that was reported."""

    def __init__(self, path: Path):
        self._path = path
        with writing(path):
            self._file = path.open("a")

    def write(self, **values: Any) -> None:
        with writing(self._path):
            self._file.write(json.dumps(numbers(values)) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path):  # what could not be written is tried once more
            self._file.close()


def numbers(value: Any) -> Any:
    """`value` with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [numbers(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def forget_after(path: Path, step: int) -> None:
    """Drops the lines of steps after `step`: a resumed run takes those steps again. What is no such line goes too."""
    if not path.exists():
        return
    with writing(path):
        lines = path.read_text(errors="replace").splitlines()
        kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
        spare = path.with_suffix(".tmp")
        spare.write_text("".join(line + "\n" for line in kept))
        spare.replace(path)


def _step_of(line: str) -> int | None:
    try:
        at = json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
    return at if isinstance(at, int) else None


class OneLate:
    """Reports the metrics of a step when the next step has been dispatched: reading them earlier would make the
    devices wait for the host. `report(step, metrics, ended)`; `ended` is when the step was seen to be over, or None:
    it is over once its metrics are read.
    """

    def __init__(self, report: Callable[[int, Any, float | None], None], now: Callable[[], float] = time.perf_counter):
        self._report = report
        self._now = now
        self._held: tuple[int, Any] | None = None
        self._ended: float | None = None

    def before_dispatch(self) -> None:
        """Notes when the step that is held ended, if it is over already. Dispatching the next one may take as long as
        a whole step (on a CPU it does): that time is the next one's."""
        if self._held and all(x.is_ready() for x in jax.tree.leaves(self._held[1])):
            self._ended = self._now()

    def push(self, step: int, metrics: Any) -> None:
        self.flush()
        self._held = step, metrics

    def flush(self) -> None:
        """Reports what is held at once: where the loop waits for the devices anyway."""
        held, self._held = self._held, None
        ended, self._ended = self._ended, None
        if held:
            self._report(*held, ended)


class StepClock:
    """Seconds per step as the loop sees them: from one `tick` to the next, less what `pause` timed."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._last = now()

    def tick(self, ended: float | None = None) -> float:
        """The seconds of a step that ended now, or at `ended`."""
        then, self._last = self._last, self._now() if ended is None else ended
        return self._last - then

    def paused(self, action: Callable[[], Any]) -> Any:
        """Runs `action` outside of the step time."""
        start = self._now()
        result = action()
        self._last += self._now() - start
        return result


def step_figures(
    metrics: dict[str, Any], seconds: float, flops_per_token: float | None, devices: int, peak: float | None
) -> dict:
    """The line of one step in metrics.jsonl. `metrics`: host values of what the step returned."""
    rate = float(metrics["tokens"]) / seconds
    return {
        "loss": float(metrics["loss"]),
        **({"side_loss": float(metrics["side_loss"])} if "side_loss" in metrics else {}),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "tokens": int(metrics["tokens"]),
        "tokens_per_second": rate,
        "step_seconds": seconds,
        "mfu": flops_per_token * rate / (devices * peak) if peak and flops_per_token else None,
    }
