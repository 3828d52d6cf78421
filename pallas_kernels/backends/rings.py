"""Passes tiles through rings in shared memory, in kernels on Mosaic GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax.experimental import pallas as pl

from pallas_kernels.backends import mosaic as gpu


@dataclass(frozen=True)
class Ring:
    """A ring of `slots` places in shared memory that tiles use in turn: step i uses slot i % slots.

    The copying warpgroup fills a slot and arrives at its `ready` barrier; the computing ones read
    it and arrive at its `free` barrier, which the copying one waits for before it fills it again.
    """

    slots: int
    ready: jax.Array
    free: jax.Array

    def slot(self, step):
        return jax.lax.rem(step, self.slots)

    def ready_at(self, step):
        """Returns the `ready` barrier of a step.

        A single slot has two, so that the barrier is computed: a fixed address would occupy a
        register.
        """
        return self.ready.at[jax.lax.rem(step, max(self.slots, 2))]


def fill_rings(steps, *rings: tuple[Ring, Callable]) -> None:
    """Runs `copy(step, slot, ready)` of each ring for `steps` steps, each once its slot is free.

    At the end it waits until all slots are free.
    """

    @pl.loop(0, steps + max(ring.slots for ring, _ in rings))
    def _(step):
        for ring, copy in rings:
            slot = ring.slot(step)
            is_reused = (step >= ring.slots) & (step < steps + ring.slots)
            pl.when(is_reused)(partial(gpu.barrier_wait, ring.free.at[slot]))
            pl.when(step < steps)(partial(copy, step, slot, ring.ready_at(step)))
