"""Takes single steps of a run in one layout, each from a plain state."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from spmdtrain.config.schema import RunConfig
from spmdtrain.data.source import open_data
from spmdtrain.lab.certify.compare import GRADIENT, UPDATE, Figures, figures_of
from spmdtrain.models.choose import MakeModel
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.running.device_batches import batches
from spmdtrain.train.batch import OF_SEQUENCES, reordered
from spmdtrain.train.compared.in_order import Plain, placed_state, plain_arrays, plain_state
from spmdtrain.train.compared.watched import make_watched_step
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard

HostBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Own:
    """The parts that a caller passes instead of settings, as `shard` takes them."""

    make: MakeModel | str | None = None
    optimizer: Any = None
    learning_rate: Any = None
    loss: Any = None

    def replaces(self, part: Literal["optimizer", "learning_rate"], config: RunConfig) -> bool:
        """Returns True if the caller or [own] of the config provides this part."""
        return getattr(self, part) is not None or getattr(config.own, part) is not None

    def shard(self, config: RunConfig, devices: Sequence[jax.Device]) -> Setup:
        """Returns the setup of `config` on these devices."""
        return shard(
            config,
            self.make,
            devices,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            loss=self.loss,
        )


class Stepper:
    """A run in one layout. Its step, which also returns gradients and updates, is compiled once."""

    def __init__(self, config: RunConfig, devices: Sequence[jax.Device], own: Own):
        config, self.data = open_data(config)
        self.setup = own.shard(config, devices)
        lowered = make_watched_step(self.setup).lower(self.setup.state, self.setup.batch)
        self._step = lowered.compile()

    def begin(self) -> Plain:
        """Returns the state before the first step."""
        return plain_state(self.setup, init_state(self.setup))

    def take(self, before: Plain, batch: Mapping[str, Any]) -> tuple[Plain, Figures]:
        """Returns the state after a step from `before`, and the figures of the step."""
        state = placed_state(self.setup, before)
        here = {
            name: jax.device_put(x, self.setup.batch[name].sharding) for name, x in batch.items()
        }
        after, metrics, watched = self._step(state, here)
        later = plain_state(self.setup, after)
        shown = {
            GRADIENT: plain_arrays(self.setup, watched.gradients),
            UPDATE: plain_arrays(self.setup, watched.updates),
        }
        numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
        return later, figures_of(before, later, shown, numbers)

    @contextmanager
    def batches(self) -> Iterator[Iterator[HostBatch]]:
        """Yields the batches of the run from its first step on, as host arrays."""
        with batches(self.setup, self.data, 0, 0) as ahead:
            yield ({name: np.asarray(x) for name, x in batch.items()} for batch in ahead)

    def cut(self, batch: Mapping[str, np.ndarray]) -> HostBatch:
        """Returns the batch of another layout, reshaped to the microbatches of this one."""
        return {name: x.reshape(self.setup.batch[name].shape) for name, x in batch.items()}


def in_data_order(setup: Setup, batch: HostBatch) -> HostBatch:
    """Returns a batch with its tokens in their original order, as on one device."""
    ways = setup.zigzag
    if ways == 1:
        return batch
    back = np.argsort(zigzag_order(batch["tokens"].shape[-1], ways))
    without_order = dict(batch)
    if setup.config.data.packing == "stream":
        del without_order["positions"]  # it only describes the order
    return reordered(without_order, back)


def hash_of(setup: Setup, batch: HostBatch) -> str:
    """Returns a hash of a batch that is the same in every layout."""
    rows = in_data_order(setup, batch)
    numbers = rows["sample"].ravel()
    order = np.argsort(numbers, kind="stable")
    digest = hashlib.sha256()
    for name in sorted(rows):
        x = rows[name]
        flat = x.ravel() if name in OF_SEQUENCES else x.reshape(numbers.size, -1)
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(flat[order]).tobytes())
    return digest.hexdigest()[:16]
