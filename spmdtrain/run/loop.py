"""A run from its first line to its last: `run` shows the seven verbs in order, the rest of the file is what they need.

Files below the run directory: checkpoint.py writes checkpoints/, journal.py the rest.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from spmdtrain.config.errors import CheckpointError, ConfigError, DivergedError, StorageError
from spmdtrain.config.load import resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.batches import EvalWindows, Range, ReadAhead, TrainStream, batch_ids, split
from spmdtrain.data.corpus import Corpus, open_corpus
from spmdtrain.models.abstract import Blueprint, MakeModel, build_model
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.models.transformer import Transformer
from spmdtrain.parallel import hlo
from spmdtrain.parallel.axes import Rules, make_rules
from spmdtrain.parallel.mesh import build_mesh
from spmdtrain.run import summary
from spmdtrain.run.checkpoint import Checkpoints, Meta, newest_step
from spmdtrain.run.interrupt import Interrupt
from spmdtrain.run.journal import Journal, only_run
from spmdtrain.run.metrics import OneLate, StepClock, forget_after, peak_flops, step_figures
from spmdtrain.run.progress import Progress, quantity
from spmdtrain.run.summary import Prediction
from spmdtrain.train.batch import abstract_batch, sequences_at_once, to_devices
from spmdtrain.train.grad_pipeline import describe, table_of
from spmdtrain.train.state import TrainState, abstract_state, init_state, is_finite
from spmdtrain.train.step import make_eval_step, make_step


@dataclass(frozen=True)
class Outcome:
    """How a run ended, after how many steps in all. `step_seconds`: median of the steps now taken, but the first."""

    status: Literal["finished", "preempted", "nothing to do"]
    step: int
    step_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Setup:
    """What a run is made of once config, data and devices have met."""

    config: RunConfig
    corpus: Corpus
    train: Range
    validation: Range
    mesh: Mesh
    rules: Rules
    blueprint: Blueprint
    abstract: TrainState
    model_name: str
    flops_per_token: float | None  # of forward and backward; None: not known for this model, so no MFU


def run(
    config: RunConfig,
    directory: str | Path,
    *,
    fresh: bool = False,
    make: MakeModel = Transformer,
    devices: Sequence[jax.Device] | None = None,
    prediction: Prediction | None = None,
) -> Outcome:
    """Trains until `train.steps`, going on from the newest checkpoint below `directory`; `fresh` sets an older run
    aside instead. `make(config, rngs)` builds the model; `devices` default to all. SIGINT or SIGTERM: saves after the
    step in flight. The end is a summary of what was compiled and measured, beside the `prediction` if there is one."""
    setup, directory = prepare(config, make, devices), Path(directory)
    config, lowered = setup.config, None
    if fresh or newest_step(directory) is None:  # what cannot begin touches no directory
        _check_source(config.train.init_from, directory, fresh)
        lowered = lower_step(setup)
    with _opened(directory, fresh):
        checkpoints = Checkpoints(directory, setup.blueprint, config.checkpoint.keep)
        with contextlib.closing(checkpoints), Journal(directory) as journal:
            state, sample = starting_state(setup, directory, checkpoints, journal)
            if (done := int(state.step)) >= config.train.steps:
                journal.say(f"{directory} is finished at step {done}; to go on: --set train.steps={2 * done}")
                return Outcome("nothing to do", done)
            journal.say(_introduction(setup))
            step, report = compile_step(setup, lowered or lower_step(setup))
            journal.document("config.json", _identity(setup))
            journal.document("compiled.json", report)
            journal.say(_compiled(report))
            with batches(setup, done, sample) as ahead:
                evaluate = make_evaluate(setup)
                outcome = train(setup, state, sample, step, evaluate, ahead, checkpoints, journal)
            stopped = f"stopped and saved at step {outcome.step}; the same command goes on"
            finished = f"finished {outcome.step} steps; everything is in {directory}"
            journal.say(finished if outcome.status == "finished" else stopped)
            figures = summary.figures(prediction, report, outcome.step_seconds, summary.peak_bytes(setup.mesh))
            journal.document("summary.json", figures)
            journal.say(summary.show(figures))
            return outcome


def prepare(config: RunConfig, make: MakeModel = Transformer, devices: Sequence[jax.Device] | None = None) -> Setup:
    """Config meets data and devices; whatever does not fit is refused here, before any memory is taken."""
    corpus = open_corpus(config.data, config.model.vocab, config.train.seed)
    config = config.with_vocab(config.model.vocab or corpus.vocab)
    mesh = build_mesh(config.mesh, devices, config.origin)
    rules = make_rules(config.rules, mesh.shape)
    stages, (microbatches, _) = mesh.shape["pipeline"], sequences_at_once(config, rules)
    if stages > 1:
        table_of(config, stages, microbatches)
    blueprint = build_model(config, make, stages, config.pipeline.chunks)
    train, validation = split(corpus, config.data.validation_fraction, config.train.sequence_length)
    if config.eval.every and not validation.size:
        raise ConfigError("eval.every asks for evaluation, but data.validation_fraction=0 keeps no validation data")
    abstract = abstract_state(config, blueprint, mesh, rules)
    own = make is not Transformer
    name = getattr(make, "__name__", "own model") if own else config.model.name
    flops = None if own else train_flops_per_token(config.model, config.train.sequence_length)
    return Setup(config, corpus, train, validation, mesh, rules, blueprint, abstract, name, flops)


def starting_state(setup: Setup, directory: Path, checkpoints: Checkpoints, journal: Journal) -> tuple[TrainState, int]:
    """The state and the global sample index to go on from: (1) the newest checkpoint of this run, (2) else the weights
    of `train.init_from`, (3) else fresh."""
    newest = checkpoints.newest()
    if jax.process_index() == 0:
        forget_after(directory / "metrics.jsonl", newest or 0)
    if newest is not None:
        state, meta = checkpoints.restore(newest, setup.abstract)
        _check_stream(meta, setup)
        _check_model(meta, setup)
        journal.event("resumed", newest, from_step=newest, mesh=dict(setup.mesh.shape))
        journal.say(f"resumed {directory} at step {newest}")
        return state, meta["sample"]
    source = setup.config.train.init_from
    params = _weights_of(Path(source), setup, journal) if source else None
    state = init_state(setup.config, setup.blueprint, setup.abstract)
    state = state if params is None else replace(state, params=params)
    journal.event("started", 0, mesh=dict(setup.mesh.shape), init_from=source)
    return state, 0


def _weights_of(run: Path, setup: Setup, journal: Journal) -> dict[str, jax.Array]:
    """The newest parameters of another run."""
    with contextlib.closing(Checkpoints(run, setup.blueprint, keep=None)) as checkpoints:
        params, meta = checkpoints.restore_params(newest_step(run), setup.abstract.params)
    for name, then, now in _model_changes(meta, setup):
        journal.say(f"the weights of {run} were trained with {name}={then}; here it is {now}")
    return params


def batches(setup: Setup, step: int, sample: int) -> ReadAhead:
    """Device batches of the steps from `step` on, which begins at the global sample index `sample`."""
    config = setup.config
    stream = TrainStream(
        setup.corpus,
        setup.train,
        config.train.sequence_length,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        packing=config.data.packing,
    )
    shape, size = sequences_at_once(config, setup.rules), config.train.global_batch

    def make(at: int):
        ids = sample + batch_ids(at - step, size)
        return to_devices(stream.samples, ids, shape, setup.mesh, setup.rules)

    return ReadAhead(make, step)


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """The step, traced: what a model cannot do on this mesh is refused here."""
    step = make_step(setup.config, setup.blueprint, setup.mesh, setup.rules)
    return step.lower(setup.abstract, abstract_batch(setup.config, setup.mesh, setup.rules))


def compile_step(setup: Setup, lowered: jax.stages.Lowered) -> tuple[Callable, dict]:
    """The step as an executable, and the report for hlo.json."""
    start = time.perf_counter()
    step = lowered.compile()
    return step, hlo.report(step, setup.mesh, time.perf_counter() - start)


def make_evaluate(setup: Setup) -> Callable[[TrainState], float]:
    """`evaluate(state) -> mean loss` over the validation split, or its first `eval.batches` batches."""
    config = setup.config
    step = make_eval_step(config, setup.blueprint, setup.mesh, setup.rules)
    shape, size = sequences_at_once(config, setup.rules), config.train.global_batch

    def evaluate(state: TrainState) -> float:
        windows = EvalWindows(setup.corpus, setup.validation, config.train.sequence_length, packing=config.data.packing)
        total = np.zeros(2)
        for index in range(windows.num_batches(size, config.eval.batches)):
            part = to_devices(windows.samples, batch_ids(index, size), shape, setup.mesh, setup.rules)
            total += jax.device_get(step(state.params, part))
        return float(total[0] / total[1])

    return evaluate


def train(
    setup: Setup,
    state: TrainState,
    sample: int,
    step: Callable,
    evaluate: Callable[[TrainState], float],
    ahead: Iterator,
    checkpoints: Checkpoints,
    journal: Journal,
) -> Outcome:
    """The loop, from `state` on. Metrics of a step are read after the next one is dispatched."""
    config, mesh = setup.config, setup.mesh
    first, total = int(state.step), config.train.steps
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    clock, taken, saved = StepClock(), [], [first] if first else []

    def report(at: int, metrics: Any, ended: float | None) -> None:
        metrics = jax.device_get(metrics)
        figures = step_figures(metrics, clock.tick(ended), setup.flops_per_token, mesh.size, peak)
        taken.append(figures["step_seconds"])
        journal.metrics(step=at, **figures)
        for what, name in (("loss", "loss"), ("gradient norm", "grad_norm")):
            if not np.isfinite(figures[name]):
                raise diverged(at, f"the {what} of step {at} is {figures[name]}")
        progress.update(at, figures, due=at in (first + 1, total))

    def diverged(at: int, what: str) -> DivergedError:
        """The numbers of step `at` have gone wrong; says where the last good ones are."""
        checkpoints.wait()
        note_saved()
        journal.event("diverged", at)
        last = f"step {saved[-1]} is the newest checkpoint" if saved else "nothing was saved"
        return DivergedError(f"{what}; {last}", fix="a lower optimizer.learning_rate")

    def save() -> None:
        if not is_finite(state):  # the next step's loss would tell, too late
            raise diverged(done, f"the weights or the optimizer state after step {done} are not finite")
        position = sample + (done - first) * config.train.global_batch
        meta = {"sample": position, "stream": _stream(setup), "model": _model_function(setup)}
        checkpoints.save(done, state, meta)

    def note_saved() -> None:
        for at in checkpoints.completed():
            journal.event("saved", at)
            saved.append(at)

    done, late = first, OneLate(report)
    with (
        Progress(total, first, config.log.every, quiet=jax.process_index() > 0) as progress,
        Interrupt(mesh) as interrupt,
    ):
        journal.progress = progress
        while done < total:
            batch = next(ahead)
            late.before_dispatch()
            with journal.profile(done + 1, config.log.profile) as traced:
                state, metrics = traced(step(state, batch))
            done += 1
            late.push(done, metrics)
            note_saved()
            ending = interrupt.agreed() or done == total
            if config.eval.every and (done % config.eval.every == 0 or done == total):
                late.flush()
                loss = clock.paused(lambda: evaluate(state))  # noqa: B023  runs at once
                journal.metrics(step=done, eval_loss=loss)
                journal.event("evaluated", done, eval_loss=loss)
                journal.say(f"step {done}/{total}  eval loss {loss:.4f}")
            if ending or (config.checkpoint.every and done % config.checkpoint.every == 0):
                late.flush()
                clock.paused(save)
            if ending:
                break
        checkpoints.wait()
        note_saved()
    status = "finished" if done == total else "preempted"
    journal.event(status, done)
    return Outcome(status, done, statistics.median(taken[1:]) if taken[1:] else None)


def _check_source(source: str | None, directory: Path, fresh: bool) -> None:
    """`train.init_from` is there, and stays there."""
    if source is None:
        return
    asked = f"train.init_from='{source}'"
    if fresh and Path(source).resolve() == directory.resolve():
        raise ConfigError(f"{asked} is the run that --fresh sets aside", fix="another --run")
    if newest_step(Path(source)) is None:
        raise CheckpointError(f"{asked} holds no checkpoint", fix="the directory of a trained run")


@contextlib.contextmanager
def _opened(directory: Path, fresh: bool) -> Iterator[None]:
    """The run directory is there, writable, this run's alone. With `fresh` an older run is renamed, never deleted."""
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            try:
                if fresh and directory.exists():
                    with only_run(directory):
                        aside = (Path(f"{directory}.{n}") for n in range(1, 1000))
                        directory.rename(next(path for path in aside if not path.exists()))
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_run(directory))
            except OSError as error:
                raise StorageError(f"cannot write the run directory {directory}: {error.strerror}") from None
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("run directory")
        yield


def _stream(setup: Setup) -> dict[str, Any]:
    """What decides which tokens a sample index means."""
    config = setup.config
    return {
        "train.seed": config.train.seed,
        "train.sequence_length": config.train.sequence_length,
        "data.shuffle": config.data.shuffle,
        "data.packing": config.data.packing,
        "data.validation_fraction": config.data.validation_fraction,
        "corpus": setup.corpus.fingerprint,
    }


def _check_stream(meta: Meta, setup: Setup) -> None:
    for name, now in _stream(setup).items():
        if (then := meta.get("stream", {}).get(name)) != now:
            what = "the corpus is not the one this run was trained on" if name == "corpus" else f"{name} has changed"
            raise CheckpointError(
                what,
                asked=str(now)[:16],
                found=f"{str(then)[:16]} in the checkpoint",
                fix="the same data and seed, or --fresh for a new run",
            )


def _model_function(setup: Setup) -> dict[str, Any]:
    """What decides the function that the weights are of, beyond their shapes."""
    model = setup.config.model
    names = ["positions", "norm", "mlp", "norm_epsilon"]
    names += ["rope_theta"] if model.positions == "rope" else []
    return {f"model.{name}": getattr(model, name) for name in names}


def _model_changes(meta: Meta, setup: Setup) -> list[tuple[str, Any, Any]]:
    """(name, in the checkpoint, now) of what `_model_function` has and differs; older checkpoints say nothing."""
    then, now = meta.get("model", {}), _model_function(setup)
    return [(name, then[name], now[name]) for name in now if name in then and then[name] != now[name]]


def _check_model(meta: Meta, setup: Setup) -> None:
    for name, then, now in _model_changes(meta, setup):
        raise CheckpointError(
            f"{name} has changed",
            asked=str(now),
            found=f"{then} in the checkpoint",
            fix=f"--set {name}={then}, or a new --run with train.init_from",
        )


def _identity(setup: Setup) -> dict[str, Any]:
    tokenizer = setup.corpus.tokenizer
    return resolved(setup.config) | {"corpus": setup.corpus.fingerprint, "tokenizer": tokenizer and tokenizer.spec()}


def _introduction(setup: Setup) -> str:
    config, mesh = setup.config, setup.mesh
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "no split"
    kind, pipeline = mesh.devices.flat[0].device_kind, ""
    if mesh.shape["pipeline"] > 1:
        microbatches, _ = sequences_at_once(config, setup.rules)
        table = table_of(config, mesh.shape["pipeline"], microbatches)
        pipeline = f"pipeline: {describe(table, setup.blueprint.layout)}\n"
    return (
        f"{setup.model_name}: {quantity(setup.blueprint.size)} parameters on {mesh.size} x {kind} ({axes})\n"
        f"{pipeline}"
        f"data: {config.data.corpus}, {quantity(setup.train.size)} tokens to train, vocabulary {config.model.vocab}"
    )


def _compiled(report: dict) -> str:
    workspace = report["memory"]["temp_bytes"] / 2**20
    called = f"; calls {', '.join(report['calls'])}" if report["calls"] else ""
    unread = "; what crosses the network is not known, see hlo.json" if "unread" in report else ""
    seconds = report["compile_seconds"]
    return f"compiled in {seconds:.1f} s; {workspace:.1f} MiB of workspace per device{called}{unread}"
