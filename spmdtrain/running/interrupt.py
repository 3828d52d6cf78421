"""SIGINT and SIGTERM: the first one asks the loop to stop after the step in flight, the second ends at once."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Interrupt:
    """Use as a context around the loop; ask `agreed()` once a step.

    With several processes a signal may reach only one of them, and all must stop at the same step: each step they sum
    their flags on the devices, and read the sum one step late, so that asking costs no wait.
    """

    def __init__(self, mesh: Mesh):
        self.requested = False
        self._mesh = mesh
        self._vote: jax.Array | None = None
        self._count = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether all processes are to stop after the step that was dispatched last."""
        if jax.process_count() == 1:
            return self.requested
        earlier, self._vote = self._vote, self._count(self._flags())
        return earlier is not None and int(earlier) > 0

    def _flags(self) -> jax.Array:
        flag = np.full(1, self.requested, np.int32)
        everywhere = NamedSharding(self._mesh, P(self._mesh.axis_names))
        return jax.make_array_from_callback((self._mesh.size,), everywhere, lambda _: flag)

    def _handle(self, number: int, _frame) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True
