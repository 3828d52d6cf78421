"""Compiles the step of a session; config.json, compiled.json and the terminal report on it."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.partition import axes_of
from spmdtrain.checkpoints.identity import Meta, config_document, identity
from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config.run_files import COMPILED, CONFIG
from spmdtrain.data.source import Data, progress_of
from spmdtrain.models.transformer import Transformer
from spmdtrain.processes import pulse
from spmdtrain.running.compile_step import compile_step, lower_step, with_stages
from spmdtrain.running.record.start import write_start
from spmdtrain.running.report.progress import quantity
from spmdtrain.running.start import kernels
from spmdtrain.running.start.agreement import check_program
from spmdtrain.running.start.begin import Session
from spmdtrain.train.setup import Setup


def compiled_step(session: Session) -> tuple[Callable, dict[str, Any]]:
    """Returns the executable of a step, and the report in compiled.json.

    Raises UserError if the processes traced different programs, and OutOfMemoryError if the step
    does not fit.
    """
    setup = session.setup
    prepared = session.prepared
    session.reporter.say(_introduction(setup, prepared.data))
    pulse.tell(pulse.COMPILE)
    earlier = kernels.keep(session.meta, setup) if session.meta else {}
    lowered = session.lowered or lower_step(setup)
    kernels.check_kept(earlier, f"step {session.done} of {prepared.directory}")
    check_program(lowered)
    step, report = compile_step(setup, lowered)
    step, report = with_stages(setup, step, report, session.done)
    session.memory.compiled(report)
    config = config_document(setup, prepared.data)
    if prepared.adapted:
        config = prepared.adapted.as_asked(config)
    implementations = kernels.document(setup)["kernels"]
    session.reporter.write(CONFIG, config | {"implementations": implementations})
    session.reporter.write(COMPILED, report)
    done = session.done
    seconds = pulse.phase().seconds  # of the trace, too
    from_cache = report["from_cache"]
    session.reporter.event("compiled", done, seconds=seconds, from_cache=from_cache)
    write_start(prepared.directory, setup, prepared.data, done, report, prepared.seams)
    session.reporter.say(_describe(report))
    return step, report


def record_of(session: Session) -> Callable[[], Meta]:
    """Returns a function that gives what a checkpoint records about the run and its data.

    The run's step must have been traced.
    """
    prepared = session.prepared
    setup = session.setup
    about_run = identity(setup, prepared.data.fingerprint, prepared.seams)
    about_run |= kernels.document(setup)
    return lambda: about_run | progress_of(prepared.data)


def _introduction(setup: Setup, data: Data) -> str:
    """Returns a description of model, mesh and data, to print before the long wait for the
    compiler.
    """
    config = setup.config
    mesh = setup.mesh
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    name = config.model.name
    if setup.make is not Transformer:
        name = type(setup.model.bind({})).__name__
    size = f"{quantity(setup.model.size)} parameters"
    if setup.model.trained_size < setup.model.size:
        size += f", {quantity(setup.model.trained_size)} of them trained,"
    lines = [*config.notes, f"{name}: {size} on {mesh.size} x {kind} ({axes or 'no split'})"]
    if mesh.shape["expert"] > 1 and not any(
        "expert" in axes_of(spec) for spec in setup.specs.values()
    ):
        lines.append(
            "mesh.expert: the model has no experts, and the axis splits the batch as data does"
        )
    for joined in setup.own.values():
        lines += joined.lines(quantity)
    if setup.context_line:
        lines.append(setup.context_line)
    if setup.pipeline:
        from spmdtrain.pipeline.draw import describe_pipeline

        of_round = len(setup.config.model.stacks[-1].pattern)
        described = describe_pipeline(setup.pipeline, setup.model.stage_layout, of_round)
        lines.append(f"pipeline: {described}")
    lines.append(f"data: {data.describe(config)}, vocabulary {config.model.vocab}")
    return "\n".join(lines)


def _describe(report: dict[str, Any]) -> str:
    workspace = memory_in(report).temp_bytes / 2**20
    seconds = report["compile_seconds"]
    parts = [f"compiled in {seconds:.1f} s", f"{workspace:.1f} MiB of workspace per device"]
    if report["calls"]:
        parts.append(f"calls {', '.join(report['calls'])}")
    if "unread" in report:
        parts.append("what crosses the network is unknown, see compiled.json")
    return "; ".join(parts)
