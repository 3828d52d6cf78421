"""Ends a run early: on a signal, or because a hook asks for it.

SIGINT and SIGTERM ask the loop to stop after the step in flight, and a second one ends the process
at once. The early warnings of schedulers, SIGUSR1 and SIGUSR2, and SIGHUP from a closed terminal
ask for the same, but never end the process, no matter how many arrive. Outside the loop there is
nothing to save: there processes/signals.py ends a command at the first signal.
"""

import signal
import threading
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.processes import closed_outputs, pulse, signals
from spmdtrain.processes.signals import COMMANDS, WARNINGS

Ending = Literal["preempted", "stopped"]  # by a signal, by a hook


class Interrupt:
    """A request to stop, which signals make. Use it as a context; call `agreed` once a step.

    With several processes a signal may reach only one of them, and all must stop at the same step.
    At each step they sum their flags on the devices and read the sum one step later, so asking
    costs no wait.
    """

    def __init__(self, mesh: Mesh):
        self.requested = False  # by a signal
        self.is_settled = False  # all processes have already agreed to stop because of one
        self._commands = signals.Requests()
        self._mesh = mesh
        self._votes: jax.Array | None = None
        everywhere = NamedSharding(mesh, P())
        self._count = jax.jit(lambda flags: jnp.sum(flags, axis=0), out_shardings=everywhere)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (*COMMANDS, *filter(_is_free, WARNINGS)):
                self._before[number] = signal.signal(number, self._handle)
            signals.saves_first(self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, stop_asked: bool = False) -> Ending | None:
        """Agrees with all processes whether to stop after the step that was dispatched last.

        `stop_asked`: a hook of this process asks to stop. Returns why they stop; None if they
        continue.
        """
        if self.is_settled:
            return "preempted"
        flags = (self.requested, stop_asked)
        if jax.process_count() > 1:
            earlier = self._votes
            self._votes = self._count(self._everywhere(flags))
            flags = (False, False) if earlier is None else np.asarray(earlier) > 0
        if flags[0]:
            return "preempted"
        return "stopped" if flags[1] else None

    def _everywhere(self, flags: tuple[bool, bool]) -> jax.Array:
        """Returns this process's flags on each of its devices, int32 [devices, 2]."""
        row = np.array([flags], np.int32)
        split = NamedSharding(self._mesh, P(self._mesh.axis_names))
        return jax.make_array_from_callback((self._mesh.size, 2), split, lambda _: row)

    def _handle(self, number: int, _frame: Any) -> None:
        if number in COMMANDS:
            if self._commands.is_second():
                signals.end(number)
        elif number == signal.SIGHUP:
            closed_outputs.drop_closed()
        self.requested = True


def _is_free(number: int) -> bool:
    """Returns True if the signal is neither ignored (nohup) nor handled by the caller.

    A launcher uses SIGUSR1 to ask for stacks, so under one it is not free.
    """
    asks_for_stacks = number == signal.SIGUSR1 and pulse.is_watched()
    return signals.is_free(number) and not asks_for_stacks
