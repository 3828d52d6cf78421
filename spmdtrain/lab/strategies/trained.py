"""Takes the steps of each strategy on the devices at hand, in turns, and keeps what was seen.

Turns make a busy machine slow for all alike. Between its turns the state of a strategy waits on the
host, so that a device holds one at a time.
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
    """A strategy on the devices at hand; if it cannot run, `refused` says why.

    `seconds`: those of a step, of each round. `sent`: bytes that a device sends in a step over each
    mesh axis; None if the compiled text does not tell them. `off`: how far the last loss is from
    the first strategy's, as a share of it. `limits`: the largest distance of a figure of any step,
    in multiples of what rounding may move it; above 1 the strategy trains something else.
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
        """True if only rounding tells it from the first strategy; None if it took no step."""
        return None if self.limits is None else self.limits <= 1


def train_in_turns(  # noqa: PLR0913 - what is compared, and for how long
    config: RunConfig,
    names: Sequence[str],
    *,
    make: MakeModel | str | None = None,
    rounds: int = 5,
    steps: int = 4,
    say: Say = lambda _: None,
) -> list[TrainedStrategy]:
    """Returns what each strategy does on all devices: `rounds` turns of `steps` steps are timed.

    One more turn before them warms up. `say` gets a line for each strategy that is compiled.
    """
    config, data = open_data(config)
    cluster = Cluster(jax.device_count(), jax.local_device_count())
    found = [TrainedStrategy(name, used_devices(name, cluster)) for name in names]
    runners: dict[str, Runner] = {}
    for each in found:
        say(f"compiling {each.name}")
        try:
            runner = Runner(laid_out(each.name, config, cluster), data, make, each.devices)
            runner.begin()
        except UserError as error:
            each.refused = str(error)
            continue
        runners[each.name] = runner
        each.mesh = dict(runner.setup.mesh.shape)
        each.memory, each.sent = runner.memory, runner.sent
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        for each in found:
            if each.name in runners:
                _take_turn(each, runners[each.name], steps, timed=number > 0)
    running = [each for each in found if not each.refused]
    if running:
        say("repeating the first with other rounding")
        judge(running, _limits(runners[running[0].name], running[0].figures))
    return found


def _take_turn(each: TrainedStrategy, runner: Runner, steps: int, *, timed: bool) -> None:
    if each.refused:  # in an earlier turn, for want of memory
        return
    try:
        seconds, figures = runner.turn(steps)
    except UserError as error:
        each.refused = str(error)
        return
    each.figures += figures
    if timed:
        each.seconds.append(seconds)


def _limits(first: Runner, figures: Figures) -> list[dict[str, float]]:
    """Returns how far rounding may move the figures of the first strategy, by its siblings."""
    siblings = []
    for number in range(SIBLINGS):
        first.begin(number)
        siblings.append(first.turn(len(figures))[1])
    return limits_among(figures, siblings)


def judge(running: Sequence[TrainedStrategy], limits: Sequence[dict[str, float]]) -> None:
    """Compares the figures of all strategies with those of the first."""
    want = running[0].figures
    for each in running:
        then, now = want[-1]["loss"], each.figures[-1]["loss"]
        each.off = abs(now - then) / abs(then) if then and now is not None else None
        each.limits = max(
            limits_apart(ours[name], theirs.get(name), limit.get(name, 0.0))
            for ours, theirs, limit in zip(want, each.figures, limits, strict=True)
            for name in FIGURES
            if name in ours
        )
