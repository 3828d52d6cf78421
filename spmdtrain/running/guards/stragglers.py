"""Finds the process that keeps the others waiting, by the time of each process's own work.

A step ends at the same time everywhere, because its collectives wait for the slowest process. A
slow host shows in the time that it spends before it dispatches a step: it makes batches, writes
figures, calls hooks. Every `log.every` steps the devices gather these times from all processes. The
result is read one interval later, so no process waits for it.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.running.report.reporter import Reporter

FACTOR = 2.0  # times the median of the others
INTERVALS = 2  # in a row: one may be an accident
LEAST_SHARE = 0.1  # of a step: a smaller delay would go unnoticed


class Stragglers:
    """A watch for a slow process among several.

    Call `after_step` after each step, and wait for others in `waiting`.
    """

    def __init__(
        self,
        mesh: Mesh,
        every: int,
        reporter: Reporter,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._every = every
        self._reporter = reporter
        self._now = now
        self._mesh = mesh
        self._begin = now()
        self._waited = 0.0
        self._steps = 0
        self._asked: jax.Array | None = None
        self._slow: tuple[int | None, int] = (None, 0)  # process, intervals in a row
        everywhere = NamedSharding(mesh, P())
        # Every device of a process holds that process's row; all have equally many devices.
        of_each = jax.local_device_count()
        self._gather = jax.jit(lambda rows: rows.sum(0) / of_each, out_shardings=everywhere)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as a wait for others, not as this process's own work."""
        start = self._now()
        try:
            yield
        finally:
            self._waited += self._now() - start

    def after_step(self, step: int) -> None:
        """Names, once, a process that was slow in the last intervals, if there is one."""
        self._steps += 1
        if step % self._every:
            return
        whole = self._now() - self._begin
        own = (whole - self._waited) / self._steps
        with self.waiting():
            self._hear(step)
            self._asked = self._gather(self._rows(own, whole / self._steps))
        self._begin = self._now()
        self._waited = 0.0
        self._steps = 0

    def _rows(self, own: float, whole: float) -> jax.Array:
        """Returns this process's seconds, on each device, float32 [devices, processes, 2].

        The last dim has its own work and the whole, per step.
        """
        row = np.zeros((1, jax.process_count(), 2), np.float32)
        row[0, jax.process_index()] = own, whole
        split = NamedSharding(self._mesh, P(self._mesh.axis_names))
        shape = (self._mesh.size, *row.shape[1:])
        return jax.make_array_from_callback(shape, split, lambda _: row)

    def _hear(self, step: int) -> None:
        if self._asked is None:
            return
        seconds = np.asarray(self._asked)
        slow = slowest(seconds[:, 0].tolist(), float(np.median(seconds[:, 1])))
        before, intervals = self._slow
        self._slow = (slow, intervals + 1 if slow == before else 1)
        if slow is not None and self._slow[1] == INTERVALS:
            own = float(seconds[slow, 0])
            others = statistics.median(np.delete(seconds[:, 0], slow).tolist())
            line = (
                f"process {slow} keeps the others waiting: its host works {own:.2g} s in each "
                f"step, the others {others:.2g} s"
            )
            figures = {"process": slow, "seconds": own, "others": others}
            self._reporter.event("straggler", step, line, **figures)


def slowest(own: Sequence[float], step: float) -> int | None:
    """Returns the process whose own seconds exceed FACTOR times the median of the others, if any.

    `step`: seconds of a whole step. The excess must also be above LEAST_SHARE of the step.
    """
    worst = max(range(len(own)), key=lambda rank: own[rank])
    others = statistics.median([seconds for rank, seconds in enumerate(own) if rank != worst])
    excess = own[worst] - others
    is_slow = own[worst] > FACTOR * others and excess > LEAST_SHARE * step
    return worst if is_slow else None
