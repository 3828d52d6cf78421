"""A run from its first line to its last: `run` shows the steps in order, the rest of the file is what
they need."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from spmdtrain.config.errors import ConfigError, DivergedError
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.batches import EvalWindows, Range, ReadAhead, TrainStream, batch_ids, split
from spmdtrain.data.corpus import Corpus, open_corpus
from spmdtrain.models.abstract import MakeModel
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.models.transformer import Transformer
from spmdtrain.parallel import hlo
from spmdtrain.running import summary
from spmdtrain.running.checkpoint import Checkpoints, newest_step
from spmdtrain.running.directory import check_source, open_directory
from spmdtrain.running.identity import check_identity, config_document, identity, model_changes
from spmdtrain.running.interrupt import Interrupt
from spmdtrain.running.journal import Journal
from spmdtrain.running.metrics import OneLate, StepClock, forget_after, peak_flops, step_figures
from spmdtrain.running.progress import Progress, quantity
from spmdtrain.running.summary import Prediction
from spmdtrain.train.batch import to_devices
from spmdtrain.train.grad_pipeline import describe
from spmdtrain.train.setup import Setup, init_state, shard
from spmdtrain.train.state import TrainState, is_finite
from spmdtrain.train.step import make_eval_step, make_step


@dataclass(frozen=True)
class Outcome:
    """How a run ended, after how many steps in all.

    `step_seconds`: median of the steps taken now, but for the first.
    """

    status: Literal["finished", "preempted", "nothing to do"]
    step: int
    step_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Data:
    """The corpus of a run, and which of its tokens train and which validate."""

    corpus: Corpus
    train: Range
    validation: Range


def run(
    config: RunConfig,
    directory: str | Path,
    *,
    fresh: bool = False,
    make: MakeModel = Transformer,
    devices: Sequence[jax.Device] | None = None,
    prediction: Prediction | None = None,
) -> Outcome:
    """Trains until `train.steps`, going on from the newest checkpoint below `directory`.

    `fresh` sets an older run aside instead. `make(config, rngs)` builds the model; `devices`
    default to all. SIGINT or SIGTERM: saves after the step in flight. The end is a summary of what
    was compiled and measured, beside the `prediction` if there is one. Raises UserError.
    """
    directory = Path(directory)
    config, data = open_data(config)
    setup = shard(config, make, devices)
    lowered = None
    if fresh or newest_step(directory) is None:  # what cannot begin touches no directory
        check_source(config.train.init_from, directory, fresh)
        lowered = lower_step(setup)
    with contextlib.ExitStack() as held:
        held.enter_context(open_directory(directory, fresh))
        checkpoints = Checkpoints(directory, setup.model, config.checkpoint.keep)
        held.enter_context(contextlib.closing(checkpoints))
        journal = held.enter_context(Journal(directory))

        state, sample = restore_or_init(setup, data, directory, checkpoints, journal)
        done = int(state.step)
        if done >= config.train.steps:
            more = f"--set train.steps={2 * done}"
            journal.say(f"{directory} is finished at step {done}; to go on: {more}")
            return Outcome("nothing to do", done)

        journal.say(_introduction(setup, data))
        step, report = compile_step(setup, lowered or lower_step(setup))
        journal.document("config.json", config_document(config, data.corpus))
        journal.document("compiled.json", report)
        journal.say(_compiled(report))

        ahead = held.enter_context(batches(setup, data, done, sample))
        evaluate = make_evaluate(setup, data)
        keep = Saves(setup, data, checkpoints, journal, done, sample)
        outcome = train(setup, state, step, evaluate, ahead, keep, journal)

        journal.say(_ending(outcome, directory))
        peak = summary.peak_bytes(setup.mesh)
        figures = summary.figures(prediction, report, outcome.step_seconds, peak)
        journal.document("summary.json", figures)
        journal.say(summary.show(figures))
        return outcome


def open_data(config: RunConfig) -> tuple[RunConfig, Data]:
    """The corpus, cut into training and validation; the config with its vocabulary resolved."""
    corpus = open_corpus(config.data, config.model.vocab, config.train.seed)
    config = config.with_vocab(config.model.vocab or corpus.vocab)
    fraction = config.data.validation_fraction
    train, validation = split(corpus, fraction, config.train.sequence_length)
    if config.eval.every and not validation.size:
        raise ConfigError("eval.every asks for evaluation, but data.validation_fraction=0 keeps no validation data")
    return config, Data(corpus, train, validation)


def restore_or_init(
    setup: Setup, data: Data, directory: Path, checkpoints: Checkpoints, journal: Journal
) -> tuple[TrainState, int]:
    """The state and the global sample index to go on from: (1) the newest checkpoint of this run,
    (2) else the weights of `train.init_from`, (3) else fresh."""
    newest = checkpoints.newest()
    mesh = dict(setup.mesh.shape)
    if jax.process_index() == 0:
        forget_after(directory / "metrics.jsonl", newest or 0)
    if newest is not None:
        state, meta = checkpoints.restore(newest, setup.state)
        check_identity(meta, setup.config, data.corpus)
        journal.event("resumed", newest, from_step=newest, mesh=mesh)
        journal.say(f"resumed {directory} at step {newest}")
        return state, meta["sample"]
    source = setup.config.train.init_from
    params = _weights_of(Path(source), setup, journal) if source else None
    state = init_state(setup)
    if params is not None:
        state = replace(state, params=params)
    journal.event("started", 0, mesh=mesh, init_from=source)
    return state, 0


def _weights_of(run: Path, setup: Setup, journal: Journal) -> dict[str, jax.Array]:
    """The newest parameters of another run."""
    with contextlib.closing(Checkpoints(run, setup.model, keep=None)) as checkpoints:
        params, meta = checkpoints.restore_params(newest_step(run), setup.state.params)
    for name, then, now in model_changes(meta, setup.config):
        journal.say(f"the weights of {run} were trained with {name}={then}; here it is {now}")
    return params


def batches(setup: Setup, data: Data, step: int, sample: int) -> ReadAhead:
    """Device batches of the steps from `step` on, which begins at the global sample index
    `sample`."""
    config = setup.config
    stream = TrainStream(
        data.corpus,
        data.train,
        config.train.sequence_length,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        packing=config.data.packing,
    )

    def make(at: int):
        ids = sample + batch_ids(at - step, config.train.global_batch)
        return to_devices(stream.samples, ids, setup.batch_shape, setup.mesh, setup.rules)

    return ReadAhead(make, step)


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """The step, traced: what a model cannot do on this mesh is refused here."""
    return make_step(setup).lower(setup.state, setup.batch)


def compile_step(setup: Setup, lowered: jax.stages.Lowered) -> tuple[Callable, dict]:
    """The step as an executable, and the report for compiled.json."""
    start = time.perf_counter()
    step = lowered.compile()
    return step, hlo.report(step, setup.mesh, time.perf_counter() - start)


def make_evaluate(setup: Setup, data: Data) -> Callable[[TrainState], float]:
    """`evaluate(state) -> mean loss` over the validation split, or its first `eval.batches`."""
    config = setup.config
    step = make_eval_step(setup)
    size = config.train.global_batch

    def evaluate(state: TrainState) -> float:
        length, packing = config.train.sequence_length, config.data.packing
        windows = EvalWindows(data.corpus, data.validation, length, packing=packing)
        total = np.zeros(2)
        for index in range(windows.num_batches(size, config.eval.batches)):
            ids = batch_ids(index, size)
            batch = to_devices(windows.samples, ids, setup.batch_shape, setup.mesh, setup.rules)
            total += jax.device_get(step(state.params, batch))
        return float(total[0] / total[1])

    return evaluate


class Saves:
    """What the loop saves, and which checkpoints it has said are there.

    The run goes on from step `first`, at the global sample index `sample`.
    """

    def __init__(
        self,
        setup: Setup,
        data: Data,
        checkpoints: Checkpoints,
        journal: Journal,
        first: int,
        sample: int,
    ):
        self._setup = setup
        self._checkpoints = checkpoints
        self._journal = journal
        self._first = first
        self._sample = sample
        self._identity = identity(setup.config, data.corpus)
        self._newest = first if first else None

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving; DivergedError where the state is not finite: nothing of it is kept."""
        if not is_finite(state):  # the next step's loss would tell, too late
            what = f"the weights or the optimizer state after step {step} are not finite"
            raise self.diverged(step, what)
        seen = (step - self._first) * self._setup.config.train.global_batch
        self._checkpoints.save(step, state, {"sample": self._sample + seen} | self._identity)

    def announce(self) -> None:
        """Says of each save that has become complete that it is."""
        for step in self._checkpoints.completed():
            self._journal.event("saved", step)
            self._newest = step

    def finish(self) -> None:
        """Waits for the last one."""
        self._checkpoints.wait()
        self.announce()

    def diverged(self, step: int, what: str) -> DivergedError:
        """The numbers of `step` have gone wrong; the error says where the last good ones are."""
        self.finish()
        self._journal.event("diverged", step)
        last = "nothing was saved"
        if self._newest is not None:
            last = f"step {self._newest} is the newest checkpoint"
        return DivergedError(f"{what}; {last}", fix="a lower optimizer.learning_rate")


def train(
    setup: Setup,
    state: TrainState,
    step: Callable,
    evaluate: Callable[[TrainState], float],
    ahead: Iterator,
    saves: Saves,
    journal: Journal,
) -> Outcome:
    """The loop, from `state` on. Metrics of a step are read after the next one is dispatched."""
    config = setup.config
    first = int(state.step)
    total = config.train.steps
    clock = StepClock()
    taken: list[float] = []
    figures_of = make_figures(setup)

    def report(at: int, metrics: Any, ended: float | None) -> None:
        metrics = jax.device_get(metrics)
        figures = figures_of(metrics, clock.tick(ended))
        taken.append(figures["step_seconds"])
        journal.metrics(step=at, **figures)
        for what, name in (("loss", "loss"), ("gradient norm", "grad_norm")):
            if not np.isfinite(figures[name]):
                raise saves.diverged(at, f"the {what} of step {at} is {figures[name]}")
        progress.update(at, figures, due=at in (first + 1, total))

    done = first
    late = OneLate(report)
    quiet = jax.process_index() > 0
    with (
        Progress(total, first, config.log.every, quiet=quiet) as progress,
        Interrupt(setup.mesh) as interrupt,
    ):
        journal.progress = progress
        while done < total:
            batch = next(ahead)
            late.before_dispatch()
            with journal.profile(done + 1, config.log.profile) as traced:
                state, metrics = traced(step(state, batch))
            done += 1
            late.push(done, metrics)
            saves.announce()
            ending = interrupt.agreed() or done == total
            if is_due(config.eval.every, done, done == total):
                late.flush()
                loss = clock.paused(lambda: evaluate(state))  # noqa: B023  runs at once
                journal.metrics(step=done, eval_loss=loss)
                journal.event("evaluated", done, eval_loss=loss)
                journal.say(f"step {done}/{total}  eval loss {loss:.4f}")
            if ending or is_due(config.checkpoint.every, done, False):
                late.flush()
                clock.paused(lambda: saves.save(done, state))  # noqa: B023
            if ending:
                break
        saves.finish()
    status = "finished" if done == total else "preempted"
    journal.event(status, done)
    return Outcome(status, done, statistics.median(taken[1:]) if taken[1:] else None)


def is_due(every: int, step: int, last: bool) -> bool:
    """Whether what happens `every` so many steps (0: never) is due after `step`."""
    return bool(every) and (last or step % every == 0)


def make_figures(setup: Setup) -> Callable[[dict[str, Any], float], dict[str, Any]]:
    """`figures(metrics, seconds)`: a step's line of metrics.jsonl."""
    peak = peak_flops(setup.mesh.devices.flat[0].device_kind)
    flops = None
    if setup.make is Transformer:  # others' are not known
        flops = train_flops_per_token(setup.config.model, setup.config.train.sequence_length)
    return lambda metrics, seconds: step_figures(metrics, seconds, flops, setup.mesh.size, peak)


def _introduction(setup: Setup, data: Data) -> str:
    config = setup.config
    mesh = setup.mesh
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    name = config.model.name
    if setup.make is not Transformer:
        name = getattr(setup.make, "__name__", "own model")
    size = quantity(setup.model.size)
    lines = [f"{name}: {size} parameters on {mesh.size} x {kind} ({axes or 'no split'})"]
    if setup.schedule:
        lines.append(f"pipeline: {describe(setup.schedule, setup.model.layout)}")
    tokens = f"{quantity(data.train.size)} tokens to train"
    lines.append(f"data: {config.data.corpus}, {tokens}, vocabulary {config.model.vocab}")
    return "\n".join(lines)


def _compiled(report: dict) -> str:
    workspace = report["memory"]["temp_bytes"] / 2**20
    seconds = report["compile_seconds"]
    parts = [f"compiled in {seconds:.1f} s", f"{workspace:.1f} MiB of workspace per device"]
    if report["calls"]:
        parts.append(f"calls {', '.join(report['calls'])}")
    if "unread" in report:
        parts.append("what crosses the network is not known, see compiled.json")
    return "; ".join(parts)


def _ending(outcome: Outcome, directory: Path) -> str:
    if outcome.status == "finished":
        return f"finished {outcome.step} steps; everything is in {directory}"
    return f"stopped and saved at step {outcome.step}; the same command goes on"
