"""A run from its first line to its last.

`run` shows the steps in order; the rest of the file is what they need.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from pallas_kernels.partition import axes_of
from spmdtrain.checkpoints.identity import (
    changes,
    check_identity,
    code_of,
    config_document,
    describe_changes,
    identity,
    model_changes,
)
from spmdtrain.checkpoints.meta import has_fingerprints
from spmdtrain.checkpoints.model_code import check_model_code
from spmdtrain.checkpoints.newest import Found
from spmdtrain.checkpoints.restore import read_newest_good
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.checkpoints.store import Checkpoints, newest_step
from spmdtrain.compiled import hlo
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.batches import ReadAhead, batch_ids
from spmdtrain.data.source import Data, Source, Tokens, open_data
from spmdtrain.models.choose import MakeModel
from spmdtrain.models.flops import counted_flops_per_token
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.models.transformer import Transformer
from spmdtrain.processes import pulse
from spmdtrain.running.agreement import check_model, check_program, check_start
from spmdtrain.running.chosen_step import check_chosen, chosen_or_newest, set_aside_later
from spmdtrain.running.directory import check_source, open_directory
from spmdtrain.running.early_stop import EarlyStop
from spmdtrain.running.elastic import adapt
from spmdtrain.running.guards.bad_steps import GoBack, Guard, Record
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.guards.memory import MemoryGuard
from spmdtrain.running.guards.replicas import ReplicaCheck
from spmdtrain.running.guards.stragglers import Stragglers
from spmdtrain.running.other_run import naming_settings, recorded
from spmdtrain.running.report import stages, summary
from spmdtrain.running.report.json_lines import write_document
from spmdtrain.running.report.metrics import OneLate, StepClock, peak_flops, step_figures
from spmdtrain.running.report.profile import profiled
from spmdtrain.running.report.progress import Progress, quantity
from spmdtrain.running.report.reporter import Hook, Reporter, check
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.running.report.summary import Prediction
from spmdtrain.running.rollback import go_back, set_aside_damaged
from spmdtrain.running.save_interval import SaveInterval
from spmdtrain.running.saves import Saves
from spmdtrain.train import evaluation
from spmdtrain.train.batch import to_devices
from spmdtrain.train.gradients.grad_pipeline import describe
from spmdtrain.train.setup import Setup, init_state, placed, shard, with_weights
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import make_step
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates.learning_rates import Schedule
from spmdtrain.train.updates.optimizers import Optimizer


@dataclass(frozen=True)
class Outcome:
    """The end of a run: how it came, and after how many steps in all.

    A run is preempted by a signal, stopped by a hook, and stopped_early by `eval.patience`; it is
    saved each time and can go on.
    `step_seconds` is the median of the steps taken now, but for the first.
    """

    status: Literal["finished", "preempted", "stopped", "stopped_early", "nothing to do"]
    step: int
    step_seconds: float | None = field(default=None, compare=False)


def run(  # noqa: PLR0913 - one keyword for each thing that a caller may exchange
    config: RunConfig,
    directory: str | Path,
    *,
    fresh: bool = False,
    step: int | None = None,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    prediction: Prediction | None = None,
    optimizer: Optimizer | None = None,
    schedule: Schedule | None = None,
    loss: TokenLoss | None = None,
    data: Source | Tokens | None = None,
    sinks: Sequence[MakeSink] = (),
    hooks: Sequence[Hook] = (),
    state: TrainState | None = None,
) -> Outcome:
    """Trains until `train.steps`, going on from the newest checkpoint below `directory`.

    A signal (interrupt.py) makes it save after the step in flight and end. The end is a summary of
    what was compiled and measured. Raises UserError for what a caller or a user did wrong.

    Args:
      fresh: set an older run in `directory` aside and begin anew.
      step: go back to this checkpoint; those of later steps are set aside.
      make: `make(config, rngs)` builds the model; default: `model.make`, see `shard`.
      devices: where to train; all unless given.
      prediction: what the summary puts beside what was measured.
      optimizer: an optax transformation, or a function of path and parameter; see `shard`.
      schedule: `schedule(step)`, the learning rate of the 0-based step; see `shard`.
      loss: `loss(logits, targets)`, the losses of tokens; see `shard`.
      data: `tokens(seed, sample index)`, the ids [sequence_length + 1] of a sample, or a `Source`
        with validation beside; takes the place of `[data]`. It must always give the same.
      sinks: where figures and events go beside the files of the run and `log.sinks`; each is
        opened by process 0 as `sink(directory, config, completed steps)`, see report/sinks.py.
      hooks: each is called as `hook(event, step, figures)` in every process after a "step", after
        an evaluation ("evaluated") and after a save is complete on disk ("saved"). One that
        returns True stops the run after the step in flight; it is saved.
      state: what a new run begins with, in the place of fresh weights; it stays as it is. Its step
        says where the run begins, as if it had taken those steps.
    """
    directory = Path(directory)
    check(sinks, hooks)
    seams = {"optimizer": optimizer, "schedule": schedule, "loss": loss, "data": data}
    asked = config
    stages.enter("opening the data")
    config, opened = open_data(asked, data)
    check_start(asked, opened, seams, directory, fresh, step)
    check_chosen(directory, step, config, fresh)
    adapted = adapt(config, directory, devices, fresh)
    stages.enter("making the model")
    setup = shard(adapted.config, make, devices, optimizer=optimizer, schedule=schedule, loss=loss)
    check_model(setup)
    config = setup.config
    lowered = None
    given = None if state is None else placed(setup, state)
    if given is not None:
        check_given(config, directory, fresh)
    if fresh or newest_step(directory) is None:  # what cannot begin touches no directory
        check_source(config.train.init_from, directory, fresh)
        lowered = lower_step(setup)
    with contextlib.ExitStack() as held:
        memory = held.enter_context(MemoryGuard(setup))
        held.enter_context(open_directory(directory, fresh))
        checkpoints = Checkpoints(directory, setup, Retention(config.checkpoint))
        held.enter_context(contextlib.closing(checkpoints))
        pulse.tell(pulse.RESTORE)
        stages.enter("looking for a checkpoint")
        with naming_settings(directory, setup, opened, seams):
            found = chosen_or_newest(checkpoints, directory, step, setup.state)
        done = found.step if found else 0 if given is None else int(given.step)
        where = f"step {done} of {directory}"
        remarks: list[str] = []
        if found is not None:
            remarks = check_identity(found.meta, setup, opened, where, recorded(directory))
        reporter = Reporter(directory, config, done, sinks, hooks)
        held.enter_context(reporter)
        if found is not None:
            state, sample = go_on(setup, seams, directory, checkpoints, found, reporter)
            if adapted.line:
                reporter.event("adapted", found.step, why=adapted.line)
                reporter.say(adapted.line)
            for line in remarks:
                reporter.say(line)
        else:
            stages.enter("making the first weights")
            state, sample = begin(setup, reporter, given), done * config.train.global_batch
        if done >= config.train.steps:
            more = f"--set train.steps={2 * done}"
            reporter.say(f"{directory} is finished at step {done}; to go on: {more}")
            return Outcome("nothing to do", done)

        early_stop = EarlyStop(config.eval, found and found.meta)
        if early_stop.is_over:
            why = f"{directory} has stopped early at step {done}: {early_stop.describe()}"
            reporter.say(f"{why}; to go on: --set eval.patience={early_stop.more_patience}")
            return Outcome("nothing to do", done)

        reporter.say(_introduction(setup, opened))
        pulse.tell(pulse.COMPILE)
        lowered = lowered or lower_step(setup)
        check_program(lowered)
        stages.enter("compiling the step")
        compiled, report = compile_step(setup, lowered)
        memory.compiled(report)
        write(directory, "config.json", adapted.as_asked(config_document(setup, opened)))
        write(directory, "compiled.json", report)
        reporter.say(_compiled(report))

        made = identity(setup, opened.fingerprint, seams)
        record = Record.of(found.meta if found else {})

        def saves_from(done: int, sample: int) -> Saves:
            return Saves(setup, made, checkpoints, reporter, done, sample, record, early_stop)

        outcome = train_and_go_back(setup, opened, compiled, state, sample, saves_from, reporter)

        again = _again(fresh, step)
        reporter.say(_ending(outcome, directory, early_stop, again, checkpoints.best()))
        peak = summary.peak_bytes(setup.mesh)
        figures = summary.figures(prediction, report, outcome.step_seconds, peak)
        write(directory, "summary.json", figures)
        reporter.say(summary.show(figures))
        return outcome


def write(directory: Path, name: str, value: Any) -> None:
    """A whole JSON file of the run, written by process 0."""
    if jax.process_index() == 0:
        write_document(directory / name, value)


def go_on(
    setup: Setup,
    seams: Mapping[str, Any],
    directory: Path,
    checkpoints: Checkpoints,
    found: Found,
    reporter: Reporter,
) -> tuple[TrainState, int]:
    """The state and the global sample index at which the run goes on, and word of it.

    `seams`: what the caller exchanged.
    """
    step = found.step
    set_aside_damaged(checkpoints, found, reporter)
    set_aside_later(checkpoints, step, reporter)
    if checkpoints.retention:
        checkpoints.retention.recall(found.meta)
    differs = changes(found.meta, setup.config, seams)
    changed = {"changed": differs} if differs else {}
    reporter.event("resumed", step, from_step=step, mesh=dict(setup.mesh.shape), **changed)
    reporter.say(f"resumed {directory} at step {step}")
    if differs:
        reporter.say(f"changed since step {step}: {describe_changes(differs)}")
    return found.state, found.meta["sample"]


def check_given(config: RunConfig, directory: Path, fresh: bool) -> None:
    """ConfigError where a run that is given a state would begin with another one."""
    there = newest_step(directory)
    if there is not None and not fresh:
        raise ConfigError(
            f"state= is of a new run, and {directory} holds step {there}",
            fix="another directory, or fresh=True",
        )
    if config.train.init_from:
        what = f"state= and train.init_from={config.train.init_from!r} both give weights"
        raise ConfigError(what, fix="one of them")


def begin(setup: Setup, reporter: Reporter, given: TrainState | None = None) -> TrainState:
    """The state of a new run: the given one, or with the weights of `train.init_from`, or fresh."""
    if given is not None:
        step = int(given.step)
        reporter.event("started", step, mesh=dict(setup.mesh.shape), init_from="state=")
        return given
    source = setup.config.train.init_from
    params = _weights_of(Path(source), setup, reporter) if source else None
    state = init_state(setup)
    if params is not None:
        state = with_weights(setup, state, params)
    reporter.event("started", 0, mesh=dict(setup.mesh.shape), init_from=source)
    return state


def _weights_of(run: Path, setup: Setup, reporter: Reporter) -> dict[str, jax.Array]:
    """The newest parameters of another run that are as they were saved."""
    reading = contextlib.closing(Checkpoints(run, setup, keep=None))
    with reading as checkpoints, naming_settings(run, setup):
        _, (params, meta), line = read_newest_good(
            checkpoints, run, lambda step: checkpoints.restore_params(step, setup.state.params)
        )
    if line:
        reporter.say(line)
    for line in check_model_code(
        meta.get("model_code"), code_of(setup), f"train.init_from='{run}'"
    ):
        reporter.say(line)
    if not has_fingerprints(meta):
        reporter.say(f"the weights of {run} have no fingerprints yet: they could not be verified")
    for name, then, now in model_changes(meta, setup.config):
        reporter.say(f"the weights of {run} were trained with {name}={then}; here it is {now}")
    return params


def batches(setup: Setup, data: Data, step: int, sample: int) -> ReadAhead:
    """Device batches of `step` and the steps after it.

    The batch of `step` begins at the global sample index `sample`.
    """
    config = setup.config
    samples = data.train_samples(config)

    def make(at: int):
        ids = sample + batch_ids(at - step, config.train.global_batch)
        return to_devices(samples, ids, setup.batch_shape, setup.mesh, setup.rules)

    return ReadAhead(make, step, config.data.read_ahead)


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """The step, traced: what a model cannot do on this mesh is refused here."""
    stages.enter("tracing the step")
    return make_step(setup).lower(setup.state, setup.batch)


def compile_step(setup: Setup, lowered: jax.stages.Lowered) -> tuple[Callable, dict]:
    """The step as an executable, and the report for compiled.json."""
    start = time.perf_counter()
    step = lowered.compile()
    return step, hlo.report(step, setup.mesh, time.perf_counter() - start)


def train_and_go_back(
    setup: Setup,
    opened: Data,
    step: Callable,
    state: TrainState,
    sample: int,
    saves_from: Callable[[int, int], Saves],
    reporter: Reporter,
) -> Outcome:
    """`train`, and again from an earlier checkpoint wherever the guard goes back to one.

    `sample` is the global index of the first sample. `saves_from(step, sample)` gives what saves a
    run that goes on from there.
    """
    evaluate = evaluation.make_eval_figures(setup, opened)
    done = int(state.step)
    with Interrupt(setup.mesh) as interrupt:
        while True:
            saves = saves_from(done, sample)
            try:
                with batches(setup, opened, done, sample) as ahead:
                    return train(setup, state, step, evaluate, ahead, saves, reporter, interrupt)
            except GoBack as error:
                bad = error.with_traceback(None)  # whose frames hold a state
            state, done, sample = go_back(bad, setup, saves, reporter)


def train(
    setup: Setup,
    state: TrainState,
    step: Callable,
    evaluate: Callable[[TrainState], dict[str, float]],
    ahead: Iterator,
    saves: Saves,
    reporter: Reporter,
    interrupt: Interrupt,
) -> Outcome:
    """The loop, from `state` on. Raises GoBack where it is to go on from an earlier checkpoint.

    Metrics of a step are read after the next one is dispatched: a hook that stops the run ends it
    with the step in flight.
    """
    config = setup.config
    first = int(state.step)
    total = config.train.steps
    clock = StepClock()
    taken: list[float] = []
    figures_of = make_figures(setup)

    def report(at: int, metrics: Any, ended: float | None) -> None:
        with stragglers.waiting():
            metrics = jax.device_get(metrics)
        figures = figures_of(metrics, clock.tick(ended))
        taken.append(figures["step_seconds"])
        reporter.step(at, **figures)
        guard.check(at, figures)
        progress.update(at, figures, due=at in (first + 1, total))

    def evaluate_and_report(at: int, state: TrainState) -> None:
        pulse.tell(pulse.EVALUATE, at)
        figures = evaluate(state)
        saves.evaluated(at, figures)
        reporter.evaluated(at, **figures)
        reporter.say(f"step {at}/{total}  {evaluation.describe(figures)}")

    def save(at: int, state: TrainState) -> None:
        pulse.tell(pulse.SAVE, at)
        start = time.perf_counter()
        guard.check_state(at, state)
        replicas.before_save(at, state)
        saves.save(at, state)
        stopped = time.perf_counter() - start
        if interval.saved(at, stopped, taken):
            more = f"the next one follows after {quantity(interval.every)} steps"
            reporter.say(f"step {at}/{total}  a save stops the run for {stopped:.2g} s: {more}")

    done = first
    guard = Guard(config.guard, saves, reporter)
    replicas = ReplicaCheck(setup.mesh, config.guard.replica_check, reporter)
    stragglers = Stragglers(setup.mesh, config.log.every, reporter)
    late = OneLate(report)
    interval = SaveInterval(config.checkpoint.every, first, setup.mesh.size)
    quiet = jax.process_index() > 0
    with Progress(total, first, config.log.every, quiet=quiet) as progress:
        reporter.progress = progress
        if config.eval.at_start and not saves.checkpoints.steps():
            clock.paused(lambda: evaluate_and_report(first, state))
        while True:
            # The first step is over when its metrics are read, after the second was dispatched.
            pulse.tell(pulse.STEP if done > first + 1 else pulse.FIRST_STEP, done + 1)
            batch = next(ahead)
            late.before_dispatch()
            profile = profiled(reporter.directory, done + 1, config.log.profile)
            with stragglers.waiting(), profile as traced:
                state, metrics = traced(step(state, batch))
            done += 1
            late.push(done, metrics)
            with stragglers.waiting():
                replicas.after_step(done, state)
            stragglers.after_step(done)
            saves.announce()
            if is_due(config.eval.every, done, done == total):
                late.flush()
                with stragglers.waiting():
                    clock.paused(lambda: evaluate_and_report(done, state))  # noqa: B023  runs at once
            with stragglers.waiting():
                ending = "finished" if done == total else interrupt.agreed(reporter.stop_asked)
                if saves.early_stop.is_over:
                    ending = ending or "stopped_early"
            if ending or interval.is_due(done) or saves.wants(done):
                late.flush()
                if ending or guard.lets_save:
                    with stragglers.waiting():
                        clock.paused(lambda: save(done, state))  # noqa: B023
            if ending:
                break
        pulse.tell(pulse.END, done)
        saves.finish()
    reporter.event(ending, done)
    return Outcome(ending, done, statistics.median(taken[1:]) if taken[1:] else None)


def is_due(every: int, step: int, last: bool) -> bool:
    """True after each `every`-th step and after the last one; never if `every` is 0."""
    return bool(every) and (last or step % every == 0)


def make_figures(setup: Setup) -> Callable[[dict[str, Any], float], dict[str, Any]]:
    """`figures(metrics, seconds)`: a step's line of metrics.jsonl."""
    config = setup.config
    peak = peak_flops(setup.mesh.devices.flat[0].device_kind)
    flops = None
    if setup.make is Transformer:
        flops = train_flops_per_token(config.model, config.train.sequence_length)
    elif peak:
        flops = counted_flops_per_token(config, setup.model)
    processed = config.train.global_batch * config.train.sequence_length

    def figures(metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
        held = summary.peak_bytes(setup.mesh)
        found = step_figures(metrics, seconds, processed, flops, setup.mesh.size, peak)
        return found | {"memory_bytes": held}

    return figures


def _introduction(setup: Setup, data: Data) -> str:
    config = setup.config
    mesh = setup.mesh
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    name = config.model.name
    if setup.make is not Transformer:
        name = type(setup.model.bind({})).__name__
    size = quantity(setup.model.size)
    lines = [*config.notes]
    lines += [f"{name}: {size} parameters on {mesh.size} x {kind} ({axes or 'no split'})"]
    if mesh.shape["expert"] > 1 and not any(
        "expert" in axes_of(spec) for spec in setup.specs.values()
    ):
        lines.append(
            "mesh.expert: the model has no experts, and the axis splits the batch as data does"
        )
    if setup.schedule:
        lines.append(f"pipeline: {describe(setup.schedule, setup.model.layout)}")
    lines.append(f"data: {data.describe(config)}, vocabulary {config.model.vocab}")
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


def _ending(
    outcome: Outcome,
    directory: Path,
    early_stop: EarlyStop,
    again: str,
    best: tuple[int, float] | None,
) -> str:
    """The last word of a run. `again`: the command that goes on; `best`: a step and its loss."""
    end = f"{outcome.status}, saved at step {outcome.step}; {again} goes on"
    if outcome.status == "stopped_early":
        why = f"stopped early after {outcome.step} steps: {early_stop.describe()}"
        end = f"{why}; everything is in {directory}"
    if outcome.status == "finished":
        end = f"finished {outcome.step} steps; everything is in {directory}"
    return end if best is None else f"{end}; the best is step {best[0]}, eval loss {best[1]:.4f}"


def _again(fresh: bool, step: int | None) -> str:
    """Says which command goes on: the same one, unless that would begin or go back again."""
    without = "--fresh" if fresh else "--step" if step else ""
    return f"the same command without {without}" if without else "the same command"
