"""Runs the step of one strategy. It is compiled once; its state is on the host between turns."""

import time
from typing import Any

import jax

from spmdtrain.compiled import hlo
from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config import RunConfig
from spmdtrain.data.source import Data
from spmdtrain.lab.replay.again import figures_of
from spmdtrain.lab.replay.rounding import moved
from spmdtrain.models.choose import MakeModel
from spmdtrain.running.compile_step import compile_step, lower_step
from spmdtrain.running.device_batches import batches
from spmdtrain.running.guards.out_of_memory import MemoryGuard
from spmdtrain.running.start import kernels
from spmdtrain.running.start.sharding import shard_with_weights
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

Figures = list[dict[str, Any]]  # of each step, in the form of metrics.jsonl


class Runner:
    """A strategy with its compiled step, and its state between turns.

    Raises UserError if the strategy cannot run.
    """

    def __init__(self, config: RunConfig, data: Data, make: MakeModel | str | None, count: int):
        self._data = data
        devices = jax.devices()[:count]
        self.setup: Setup = shard_with_weights(config, make, devices, data.tokenizer)
        with MemoryGuard(self.setup) as guard, kernels.decided(self.setup):
            self._step: Any
            self._step, report = compile_step(self.setup, lower_step(self.setup))
            guard.compiled(report)
        self.memory = memory_in(report)
        self._state: TrainState | None = None
        self._taken = 0

    @property
    def sent(self) -> dict[str, float] | None:
        """The bytes a device sends in a step, by mesh axis; None if XLA's text does not tell."""
        try:
            traffic = hlo.traffic(self._step.as_text(), dict(self.setup.mesh.shape))
        except hlo.UNREADABLE:
            return None
        sums: dict[str, float] = {}
        for operation in traffic:
            sums[operation["axis"]] = sums.get(operation["axis"], 0.0) + operation["sent"]
        return {axis: sent for axis, sent in sums.items() if sent}

    def begin(self, sibling: int | None = None) -> None:
        """Starts at step 0. With `sibling`, moves every weight by about one rounding error."""
        with MemoryGuard(self.setup):
            state = init_state(self.setup)
            if sibling is not None:
                state = moved(state, sibling, self.setup.config.precision.compute)
        self._state, self._taken = jax.device_get(state), 0

    def run_steps(self, steps: int) -> tuple[float, Figures]:
        """Takes `steps` steps. Returns the mean seconds of one, and the figures of all."""
        first = self.setup.config.train.samples_before(self._taken)
        with batches(self.setup, self._data, self._taken, first) as ahead:
            feed = [next(ahead) for _ in range(steps)]
        shardings = jax.tree.map(lambda x: x.sharding, self.setup.state)
        with MemoryGuard(self.setup):
            state = jax.block_until_ready(jax.device_put(self._state, shardings))
            step_metrics = []
            start = time.perf_counter()
            for batch in jax.block_until_ready(feed):
                state, metrics = self._step(state, batch)
                step_metrics.append(metrics)
            jax.block_until_ready((state, step_metrics))
            seconds = (time.perf_counter() - start) / steps
        self._state = jax.device_get(state)
        self._taken += steps
        return seconds, [figures_of(metrics) for metrics in step_metrics]
