"""Islands beside training in step: loss after equal tokens, bytes, and time on a simulated clock.

    python benchmarks/islands.py --text FILE [--steps N] [--set KEY=VALUE] [--only NAME ...]
                                 [--write docs/islands.md]

All islands train in this process, in turns and on one device, with the compiled step of a run, and
meet through a folder as runs do. So losses and bytes are those of separate runs. The time is
simulated: a step takes an island as long as its sequences times its slowness, and who trains in
step waits for the slowest after each step, islands when they meet. The time in which an island is
away counts for nobody else. What a network takes is left out.

The model is that of convergence.py. Bytes are those that an island reads of others in the regular
meetings, over those of a float32 all-reduce in each step: 2 (K - 1) / K x 4 bytes a weight.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
from convergence import END, RUN, START

import spmdtrain as st
from spmdtrain.data.source import open_data
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.device_batches import batches
from spmdtrain.running.islands.island import Island
from spmdtrain.running.islands.meetings import Meetings
from spmdtrain.train.evaluation import make_eval_figures
from spmdtrain.train.islands.meeting_times import Timetable
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

ISLANDS = 4
SEQUENCES = 32  # of all islands, a step
EVERY = 20
HEAD = (
    "| run | sequences a step | loss | against in step | bytes | simulated time |",
    "|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Case:
    """A run. `batches`: the sequences of each island a step; one number: without islands.

    `slowness`: the time that a sequence takes each island. `away`: an island, and the shares of the
    run between which it is gone.
    """

    name: str
    batches: tuple[int, ...]
    settings: tuple[str, ...] = ()
    slowness: tuple[float, ...] = (1.0,) * ISLANDS
    away: tuple[int, float, float] | None = None


EQUAL = (SEQUENCES // ISLANDS,) * ISLANDS
ONE_SLOW = (1.0, 1.0, 1.0, 3.0)
IN_STEP = "in step"
CASES = (
    Case(IN_STEP, (SEQUENCES,)),
    Case("one island alone", (SEQUENCES // ISLANDS,), slowness=(1.0,)),
    Case("islands", EQUAL),
    Case("islands that average", EQUAL, ("islands.outer=average",)),
    Case("islands, int8", EQUAL, ("islands.codec=int8",)),
    Case("islands, 2 fragments", EQUAL, ("islands.fragments=2",)),
    Case("islands, 5 steps late", EQUAL, ("islands.delay=5",)),
    Case("islands, one away from 45 to 65 %", EQUAL, away=(2, 0.45, 0.65)),
    Case("in step, one 3 times slower", (SEQUENCES,), slowness=ONE_SLOW),
    Case("islands, one 3 times slower", (10, 10, 9, 3), slowness=ONE_SLOW),
)


@dataclass
class Worker:
    """An island at work; `island` is None for a run without islands. `clock`: simulated time."""

    setup: Setup
    step: Any
    ahead: Any
    state: TrainState
    meetings: Meetings | None = None
    island: Island | None = None
    clock: float = 0.0
    done: int = 0


@dataclass
class Run:
    """What came of a case."""

    loss: float
    time: float
    bytes: float | None = None  # over those of an all-reduce in each step


@dataclass
class Benchmark:
    """Runs cases on one text. All are judged by the same setup, on the same held-out windows."""

    text: Path
    steps: int
    folder: Path
    settings: tuple[str, ...] = ()  # of all cases
    after: int = field(init=False)
    compiled: dict[Any, tuple[Setup, Any, TrainState]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A third of the run in step, and a number of whole rounds after it.
        self.after = self.steps - self.steps * 2 // 3 // EVERY * EVERY
        self.config = self.folder / "run.toml"
        self.config.write_text(RUN.format(text=self.text))
        config, self.data = open_data(self._settings(SEQUENCES, ()))
        self.judge = st.shard(config, devices=jax.devices()[:1])
        self.figures = make_eval_figures(self.judge, self.data)

    def run(self, case: Case, number: int) -> Run:
        """Trains, and returns the loss and the figures of the meetings."""
        folder = self.folder / f"meetings{number}"
        workers = [self._worker(case, index, folder) for index in range(len(case.batches))]
        before_regular = 0  # bytes; of the last island, which finds each part averaged
        for step in range(1, self.steps + 1):
            present = [each for i, each in enumerate(workers) if not _is_away(case, i, step, self)]
            for each in present:
                self._step(each, step)
            self._tick(case, workers, present)
            if workers[0].island:
                self._meet(workers, present, step)
            if step == self.after and workers[-1].meetings:
                _, before_regular = workers[-1].meetings.traffic()
        for each in workers:
            each.ahead.close()
        state = workers[0].state
        loss = self.figures(self._judged(state))["eval_loss"]
        time = max(each.clock for each in workers)
        if workers[-1].meetings is None:
            return Run(loss, time)
        received = workers[-1].meetings.traffic()[1] - before_regular
        weights = sum(x.size for x in state.params.values())
        all_reduces = (self.steps - self.after) * 2 * (ISLANDS - 1) / ISLANDS * 4 * weights
        return Run(loss, time, received / all_reduces)

    def _settings(self, batch: int, settings: tuple[str, ...]) -> st.RunConfig:
        own = (f"train.steps={self.steps}", f"train.global_batch={batch}", "eval.every=1")
        return st.load(self.config, (*own, *self.settings, *settings))

    def _worker(self, case: Case, index: int, folder: Path) -> Worker:
        settings: tuple[str, ...] = ()
        if len(case.batches) > 1:
            own = (f"islands.index={index}", f"islands.directory={folder}", "islands.patience=0.0")
            counts = (f"islands.count={ISLANDS}", f"islands.every={EVERY}")
            settings = (*own, *counts, f"islands.after={self.after}", *case.settings)
        config, data = open_data(self._settings(case.batches[index], settings))
        key = case.batches[index], len(case.batches), case.settings
        if key not in self.compiled:
            setup = st.shard(config, devices=jax.devices()[:1])
            self.compiled[key] = setup, lower_step(setup).compile(), st.init_state(setup)
        alike, step, begun = self.compiled[key]
        setup = replace(alike, config=config)  # another index, which no program depends on
        state = jax.tree.map(jnp.copy, begun)  # a step donates its state
        worker = Worker(setup, step, batches(setup, data, 0, 0), state)
        if settings:
            worker.meetings = Meetings(folder, index, patience=0.0)
            worker.island = Island(setup, worker.meetings, {"pid": index})
        return worker

    def _step(self, worker: Worker, step: int) -> None:
        """Takes a step; an island that was away first leaps to where the others are."""
        if worker.done < step - 1:
            assert worker.island, "a run without islands is never away"
            worker.state, worker.done = worker.island.leap(worker.done, worker.state)
            worker.ahead.close()
            sample = worker.done * worker.setup.config.train.global_batch
            worker.ahead = batches(worker.setup, self.data, worker.done, sample)
        worker.state, _ = worker.step(worker.state, next(worker.ahead))
        worker.done += 1

    def _meet(self, workers: list[Worker], present: list[Worker], step: int) -> None:
        """Lets those meet who are there: all leave their change, and then all take the mean."""
        for each in present:
            assert each.island, "islands have them"
            if each.island.sends(step):
                each.island.send(step, each.state)
        for each in present:
            assert each.island, "islands have them"
            if met := each.island.takes(step):
                each.state, *_ = each.island.take(met, each.state, step)
        late = Timetable.of(present[0].setup.config.islands).late(step, self.steps)
        if present[0].island and present[0].island.sends(step) and not late:
            now = max(each.clock for each in present)
            for each in workers:
                each.clock = now

    def _tick(self, case: Case, workers: list[Worker], present: list[Worker]) -> None:
        """Moves the clocks by a step: in step all wait for the slowest of equal shares."""
        if len(case.batches) == 1:
            share = case.batches[0] / len(case.slowness)
            workers[0].clock += share * max(case.slowness)
            return
        for index, each in enumerate(workers):
            if each in present:
                each.clock += case.batches[index] * case.slowness[index]

    def _judged(self, state: TrainState) -> TrainState:
        params = {
            path: jax.device_put(x, self.judge.state.params[path].sharding)
            for path, x in state.params.items()
        }
        return TrainState(state.step, params, {})


def _is_away(case: Case, index: int, step: int, benchmark: Benchmark) -> bool:
    """Returns True if an island is gone at this step; it comes back where a meeting has been."""
    if case.away is None or case.away[0] != index:
        return False
    regular = benchmark.steps - benchmark.after
    first, last = (
        benchmark.after + round((share * benchmark.steps - benchmark.after) / EVERY) * EVERY
        for share in case.away[1:]
    )
    assert 0 < last - first < regular, "it is away for some meetings"
    return first + EVERY // 2 < step <= last


def rows(benchmark: Benchmark, cases: list[Case]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield from HEAD
    base = None
    for number, case in enumerate(cases):
        found = benchmark.run(case, number)
        base = base or found.loss
        said = " + ".join(map(str, case.batches))
        share = "" if found.bytes is None else f"1/{1 / found.bytes:.0f}"
        apart = f"{found.loss / base - 1:+.1%}"
        yield f"| {case.name} | {said} | {found.loss:.4f} | {apart} | {share} | {found.time:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a file of real text, 1 MB")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", help="names of cases, the first of them the baseline")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    given = parser.parse_args()
    unknown = set(given.only or ()) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"no case is called {', '.join(unknown)}; {', '.join(c.name for c in CASES)} are")
    cases = [case for case in CASES if not given.only or case.name in given.only]
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        table = []
        text, settings = given.text.resolve(), tuple(given.settings)
        for line in rows(Benchmark(text, given.steps, Path(folder), settings), cases):
            table.append(line)
            print(line, flush=True)
    if given.write:
        page = given.write.read_text(encoding="utf-8")
        head, _, rest = page.partition(START)
        _, _, tail = rest.partition(END)
        text = "\n".join([f"{head}{START}", "", *table, "", f"{END}{tail}"])
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
