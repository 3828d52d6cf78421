"""Times a step in jax: the framework's own, or one written by hand, from the same first values."""

import os
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from spmdtrain.config.schema import RunConfig

DRY_SCALE = 8.0  # of the first values
FIRST = 3  # of how many steps the losses are compared


def measured(config: RunConfig, chosen: Namespace, by_hand: bool) -> dict[str, Any]:
    """Writes the first values and batches to `chosen.start` if they are not there."""
    if chosen.on_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax
    if not by_hand:
        from spmdtrain.processes.kept_memory import keep_freed_memory

        keep_freed_memory()  # as the command line does
    import jax

    from spmdtrain.data.source import open_data
    from spmdtrain.models.size import train_flops_per_token
    from spmdtrain.running.device_batches import batches as device_batches
    from spmdtrain.running.report.metrics import peak_flops
    from spmdtrain.train.fresh import init_state
    from spmdtrain.train.shard import shard

    device = jax.devices()[0]
    if device.platform == "cpu" and not chosen.on_cpu:
        raise SystemExit("there is no GPU here; --dry runs tiny shapes on the CPU")
    config, data = open_data(config)
    setup = shard(config, devices=[device])
    state = init_state(setup)
    # Such small matrices do hardly anything: what they compute would not show in the loss.
    if chosen.dry:
        state = replace(
            state,
            params={name: x * (DRY_SCALE if x.ndim > 1 else 1) for name, x in state.params.items()},
        )
    with device_batches(setup, data, 0, 0) as ahead:
        batches = [next(ahead) for _ in range(FIRST)]
    if not chosen.start.exists():
        first = {
            f"batch{i}.{name}": np.asarray(batch[name][0])
            for i, batch in enumerate(batches)
            for name in ("tokens", "targets")
        }
        np.savez(chosen.start, **{name: np.asarray(x) for name, x in state.params.items()}, **first)
    count = sum(x.size for x in state.params.values())
    if by_hand:
        from bare import compiled_step

        batches = [(batch["tokens"][0], batch["targets"][0]) for batch in batches]
        given, state = state.params, None
        step, state, compiled_bytes = compiled_step(setup.config, given, batches[0])
        del given
    else:
        step, compiled_bytes = _framework(setup, device.device_kind)
    found = timed(step, state, batches, chosen)
    model, train = setup.config.model, setup.config.train
    return found | {
        "parameters": count,
        "tokens": train.global_batch * train.sequence_length,
        "flops_per_token": train_flops_per_token(model, train.sequence_length),
        "peak": peak_flops(device.device_kind),
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "compiled_bytes": compiled_bytes,
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
    }


def _framework(setup, device_kind: str) -> tuple[Callable, int]:
    """Returns the framework's compiled step, with the kernels that were measured on this GPU."""
    from pallas_kernels.chosen import using
    from pallas_kernels.tuning import Table
    from spmdtrain.compiled.step_memory import memory_in
    from spmdtrain.running.compile_step import compile_step, lower_step

    with ExitStack() as held:
        held.enter_context(using(Table().chosen(device_kind)))
        step, report = compile_step(setup, lower_step(setup))

    def run(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return run, memory_in(report).held


def timed(step: Callable, state: Any, batches: list[Any], chosen: Namespace) -> dict[str, Any]:
    """Runs `step(state, batch) -> (state, loss)`: the first losses, then seconds of a step."""
    import jax

    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    for i in range(chosen.warmup):
        state, loss = step(state, batches[i % FIRST])
    jax.block_until_ready(state)
    start, cpu_start = time.perf_counter(), time.process_time()
    for i in range(chosen.steps):
        state, loss = step(state, batches[i % FIRST])
    jax.block_until_ready(state)
    return {
        "seconds": (time.perf_counter() - start) / chosen.steps,
        "cpu_seconds": (time.process_time() - cpu_start) / chosen.steps,
        "losses": losses,
    }
