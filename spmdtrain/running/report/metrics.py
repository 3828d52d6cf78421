"""Computes the figures of a step, and decides when they are read.

Speed counts all tokens that a step processes, with or without a loss. MFU (model FLOPs utilisation)
is model FLOPs per token x tokens per second / (devices x peak). The model FLOPs are those of
`models.size.train_flops_per_token`; for a custom model, and where weights are frozen, those that
`models.counted_flops` counts; what parts of the step add is added. Causal attention counts half,
and recomputation does not count. The peak is that of dense bfloat16 in pallas_kernels/gpus.py; on
hardware not listed there MFU is null, never guessed.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax

from pallas_kernels import gpus
from spmdtrain.config.stage_timetable import TimedStage
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.models.transformer import Transformer
from spmdtrain.running.report import summary
from spmdtrain.train.gradients.sums import COUNTS, number_of
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import OF_THE_STEP


def peak_flops(device_kind: str) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a device by jax's name; None if gpus.py lacks it."""
    gpu = gpus.find(device_kind)
    return None if gpu is None else gpu.bfloat16


class OneLate:
    """A report of each step's metrics, made once the next step has been dispatched.

    Reading them earlier would make the devices wait for the host. `report(step, metrics, ended)`
    takes the time at which the step was seen to have ended; None: it ends when its metrics are
    read.
    """

    def __init__(
        self,
        report: Callable[[int, Any, float | None], None],
        now: Callable[[], float] = time.perf_counter,
    ):
        self._report = report
        self._now = now
        self._held: tuple[int, Any] | None = None
        self._ended: float | None = None

    def before_dispatch(self) -> None:
        """Notes when the held step ended, if it has.

        Dispatching the next step may take as long as a whole step (on a CPU it does), and that time
        belongs to the next step.
        """
        if self._held and all(x.is_ready() for x in jax.tree.leaves(self._held[1])):
            self._ended = self._now()

    def push(self, step: int, metrics: Any) -> None:
        """Reports the step that was held, and holds this one."""
        self.flush()
        self._held = step, metrics

    def flush(self) -> None:
        """Reports the held step at once; for when the loop waits for the devices anyway."""
        held = self._held
        ended = self._ended
        self._held = None
        self._ended = None
        if held:
            self._report(*held, ended)


class StepClock:
    """The clock of a run's steps, as the loop sees them: from `tick` to `tick`, minus each
    `pause`.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._last = now()

    def tick(self, ended: float | None = None) -> float:
        """Returns the seconds of a step that ended now, or at `ended`."""
        before = self._last
        self._last = self._now() if ended is None else ended
        return self._last - before

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Counts the time inside as part of no step."""
        start = self._now()
        yield
        self._last += self._now() - start


def make_figures(setup: Setup) -> Callable[[int, dict[str, Any], float], dict[str, Any]]:
    """Returns `figures(step, metrics, seconds)`, which makes a step's line of metrics.jsonl."""
    config = setup.config
    peak = peak_flops(setup.mesh.devices.flat[0].device_kind)
    by_stage: dict[TimedStage, float | None] = {}
    parameters = setup.model.parameters.values()
    whole = all(parameter.is_trained for parameter in parameters)
    for stage in config.train.timetable:
        own = config.in_stage(stage)
        if setup.make is Transformer and whole and not own.finetune.frozen_layers:
            by_stage[stage] = train_flops_per_token(config.model, stage.sequence_length)
        elif peak:
            from spmdtrain.models.counted_flops import counted_flops_per_token

            by_stage[stage] = counted_flops_per_token(own, setup.model)
        flops = by_stage.get(stage)
        if flops is not None:
            length = stage.sequence_length
            by_stage[stage] = flops + sum(own.flops_per_token(length) for own in setup.own.values())

    def figures(step: int, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
        held = summary.peak_bytes(setup.mesh)
        stage = config.train.stage_of(step)
        flops = by_stage.get(stage)
        of_items = setup.items.figure_names
        of_step = step_figures(
            metrics, seconds, stage.tokens, flops, setup.mesh.size, peak, of_items
        )
        return of_step | {"memory_bytes": held}

    return figures


def step_figures(
    metrics: dict[str, Any],
    seconds: float,
    processed: int,
    flops_per_token: float | None,
    devices: int,
    peak: float | None,
    of_items: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the line of one step in metrics.jsonl.

    `metrics` are the scalars that the step returned, on the host; `seconds` is how long it took,
    and `processed` the tokens of its batch, including those without a loss. `flops_per_token` and
    `peak` (FLOP/s of one device) may be unknown: then mfu is None. A loss averaged over no tokens
    is left out; `of_items`, the figures about items of the state, are no means.
    """
    rate = processed / seconds
    others = OF_THE_STEP.union(of_items)
    figures = {
        name: float(value)
        for name, value in metrics.items()
        if name in others or _has_tokens(name, metrics)
    }
    mfu = None
    if peak and flops_per_token:
        mfu = flops_per_token * rate / (devices * peak)
    counts = {name: int(n) for name, n in figures.items() if name.partition("/")[0] in COUNTS}
    return figures | {
        **counts,
        "tokens_per_second": rate,
        "step_seconds": seconds,
        "mfu": mfu,
    }


def _has_tokens(name: str, metrics: dict[str, Any]) -> bool:
    """Returns False for a mean over no tokens, and for the figures of a source with none here."""
    _, slash, source = name.partition("/")
    if slash:
        return bool(metrics.get(f"tokens/{source}", 1))
    return bool(number_of(metrics))
