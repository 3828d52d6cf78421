"""Traces steps of a run without a trace, from the newest checkpoint before its last step."""

from collections.abc import Sequence
from pathlib import Path

import jax

from spmdtrain.config.errors import CheckpointError
from spmdtrain.lab.replay.again import figures_of
from spmdtrain.lab.replay.opened import open_replay
from spmdtrain.lab.replay.written import read_written
from spmdtrain.models.choose import MakeModel
from spmdtrain.running.device_batches import batches
from spmdtrain.running.report.profile import profiled

WARM = 2  # steps before the first traced one, which load programs and fill caches


def trace_steps(
    run: Path,
    count: int,
    *,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    own: Sequence[str] = (),
) -> list[int]:
    """Repeats steps of a run, traces the last `count` of them into RUN/profile, and returns them.

    The run itself stays as it is: no checkpoint and no figures are written. Raises UserError as
    `replay` does.
    """
    last = read_written(run).last
    if not last:
        raise CheckpointError(f"{run} has taken no step", fix="a run that has")
    with open_replay(run, last, make=make, devices=devices, own=own) as opened:
        first = opened.start + WARM + 1
        chosen = range(first, first + count)
        state = opened.begin()
        with batches(opened.setup, opened.data, opened.start, opened.sample) as ahead:
            for number in range(opened.start + 1, chosen.stop):
                batch = next(ahead)
                with profiled(run, number, chosen, opened.step) as traced:
                    state, metrics = traced(opened.step(state, batch))
                figures_of(metrics)
    return list(chosen)
