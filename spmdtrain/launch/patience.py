"""Limits the time that a phase may take before it counts as a hang.

The limit of a phase is FACTOR times the longest that it has taken so far, but at least its floor:
the rule of NVIDIA's nvidia-resiliency-ext for its heartbeats.
"""

from spmdtrain.processes import pulse

FACTOR = 5
STEP_SECONDS = 60.0
# Seconds for the other phases, which a cold file system or a large program may slow down.
FLOORS = {
    pulse.BEGIN: 600.0,
    pulse.RESTORE: 1200.0,
    pulse.COMPILE: 3600.0,
    pulse.FIRST_STEP: 600.0,
    pulse.SAVE: 600.0,
    pulse.EVALUATE: 1200.0,
    pulse.END: 600.0,
}


class Patience:
    """The limits of the phases. `step_seconds` is the floor of a step."""

    def __init__(self, step_seconds: float = STEP_SECONDS):
        self._floors = FLOORS | {pulse.STEP: step_seconds}
        self._longest: dict[str, float] = {}

    def learn(self, phase: str, seconds: float) -> None:
        """Records that a phase has ended after `seconds`."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    def limit(self, phase: str) -> float:
        """Returns the seconds after which the phase counts as a hang."""
        return max(self._floors[phase], FACTOR * self._longest.get(phase, 0.0))
