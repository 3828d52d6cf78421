"""Runs the strategies in turns on the devices of this machine, and records times and figures.

Taking turns, all strategies suffer equally from other load on the machine. Between its turns the
state of a strategy is on the host, so that a device holds only one state at a time.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax

from spmdtrain.compiled.step_memory import StepMemory
from spmdtrain.config import RunConfig
from spmdtrain.config.errors import UserError
from spmdtrain.data.source import open_data
from spmdtrain.lab.replay.rounding import FIGURES, SIBLINGS, limits_among, limits_apart
from spmdtrain.lab.strategies.layouts import Cluster, laid_out, used_devices
from spmdtrain.lab.strategies.runner import Figures, Runner
from spmdtrain.models.choose import MakeModel

Say = Callable[[str], None]


@dataclass
class TrainedStrategy:
    """A strategy on the devices of this machine. If it cannot run, `refused` says why.

    `seconds` are those of a step, one for each round. `sent` are the bytes that a device sends in a
    step, by mesh axis, or None if the compiled text does not show them. `off` is the relative
    difference of its last loss from that of the first strategy. `limits` is the largest distance of
    a figure in any step, in multiples of the rounding error allowed for it; above 1 the strategy
    trains something else.
    """

    name: str
    devices: int
    mesh: dict[str, int] = field(default_factory=dict)
    memory: StepMemory | None = None
    sent: dict[str, float] | None = None
    seconds: list[float] = field(default_factory=list)
    figures: Figures = field(default_factory=list)
    off: float | None = None
    limits: float | None = None
    refused: str = ""

    @property
    def median(self) -> float:
        """The seconds of a step: the median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def is_same(self) -> bool | None:
        """True if it equals the first strategy up to rounding; None if it took no step."""
        return None if self.limits is None else self.limits <= 1


def train_in_turns(  # noqa: PLR0913 - the strategies, and how long they run
    config: RunConfig,
    names: Sequence[str],
    *,
    make: MakeModel | str | None = None,
    rounds: int = 5,
    steps: int = 4,
    say: Say = lambda _: None,
) -> list[TrainedStrategy]:
    """Runs each strategy on all devices, and times `rounds` turns of `steps` steps.

    An untimed turn before them warms up. `say` is called with a line of progress.
    """
    config, data = open_data(config)
    cluster = Cluster(jax.device_count(), jax.local_device_count())
    strategies = [TrainedStrategy(name, used_devices(name, cluster)) for name in names]
    runners: dict[str, Runner] = {}
    for strategy in strategies:
        say(f"compiling {strategy.name}")
        try:
            runner = Runner(laid_out(strategy.name, config, cluster), data, make, strategy.devices)
            runner.begin()
        except UserError as error:
            strategy.refused = str(error)
            continue
        runners[strategy.name] = runner
        strategy.mesh = dict(runner.setup.mesh.shape)
        strategy.memory, strategy.sent = runner.memory, runner.sent
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        for strategy in strategies:
            if strategy.name in runners:
                _take_turn(strategy, runners[strategy.name], steps, timed=number > 0)
    running = [strategy for strategy in strategies if not strategy.refused]
    if running:
        say("repeating the first with other rounding")
        judge(running, _limits(runners[running[0].name], running[0].figures))
    return strategies


def _take_turn(strategy: TrainedStrategy, runner: Runner, steps: int, *, timed: bool) -> None:
    if strategy.refused:  # in an earlier turn: it ran out of memory
        return
    try:
        seconds, figures = runner.run_steps(steps)
    except UserError as error:
        strategy.refused = str(error)
        return
    strategy.figures += figures
    if timed:
        strategy.seconds.append(seconds)


def _limits(first: Runner, figures: Figures) -> list[dict[str, float]]:
    """Returns how far rounding may move the figures of the first strategy, from its siblings."""
    siblings = []
    for number in range(SIBLINGS):
        first.begin(number)
        siblings.append(first.run_steps(len(figures))[1])
    return limits_among(figures, siblings)


def judge(running: Sequence[TrainedStrategy], limits: Sequence[dict[str, float]]) -> None:
    """Compares the figures of all strategies with those of the first."""
    want = running[0].figures
    for strategy in running:
        then, now = want[-1]["loss"], strategy.figures[-1]["loss"]
        strategy.off = abs(now - then) / abs(then) if then and now is not None else None
        strategy.limits = max(
            limits_apart(ours[name], theirs.get(name), limit.get(name, 0.0))
            for ours, theirs, limit in zip(want, strategy.figures, limits, strict=True)
            for name in FIGURES
            if name in ours
        )
