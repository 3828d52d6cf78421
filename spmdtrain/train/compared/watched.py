"""Makes a training step that also returns its gradients and updates.

It is the step of step.py, which exposes them while it is traced. The extra results may change how
XLA fuses operations, so numbers may differ from those of the unwatched step by rounding.
"""

from typing import Any, NamedTuple

import jax

from spmdtrain.train.batch import Batch
from spmdtrain.train.external_arrays.check_arrays import Checked
from spmdtrain.train.items.item import Metrics
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import checked_step, out_shardings, traced_step

ByPath = dict[str, jax.Array]


class Watched(NamedTuple):
    """The intermediate results of a step, by dotted path of the trained parameters, sharded like
    them.

    `gradients`: those of the mean loss over the batch, before clipping.
    `updates`: those of the optimizer, before they are scaled by a rate and subtracted.
    """

    gradients: ByPath
    updates: ByPath


def make_watched_step(setup: Setup) -> Checked:
    """Returns `step(state, batch) -> (state, metrics, Watched)`, jitted; it does not donate its
    argument.

    Raises ConfigError as the step of `make_step` does.
    """
    check_setup(setup)
    return checked_step(setup, jax.jit(_watched_step(setup), out_shardings=_rest(setup)))


def _watched_step(setup: Setup) -> Any:
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, Watched]:
        traces: list[Watched] = []
        traced = traced_step(setup, lambda *both: traces.append(Watched(*both)))
        after, metrics = traced(state, batch)
        (watched,) = traces
        return after, metrics, watched

    return step


def _rest(setup: Setup) -> tuple[TrainState, None, Watched]:
    """Returns the shardings of the results: those of gradients and updates are their
    parameters'.
    """
    at_rest: Any = {path: setup.state.params[path].sharding for path in setup.update_rules}
    return *out_shardings(setup), Watched(at_rest, at_rest)
