"""Finds the table that a run's settings ask for: a named schedule, or one in a file."""

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.pipeline import schedule
from spmdtrain.pipeline.schedule import Table, without_backward_of
from spmdtrain.pipeline.stage_layout import StageLayout


def choose_table(kind: str, stages: int, chunks: int, microbatches: int) -> Table:
    """Returns the table of `kind`: a name in schedule.SCHEDULE_KINDS, or a .json or .csv file.

    A named schedule is built in these sizes. Raises ConfigError if a file has other sizes.
    """
    if kind in schedule.SCHEDULE_KINDS:
        return schedule.build(kind, stages, microbatches, chunks)
    from spmdtrain.pipeline import file

    table = file.read(kind)
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    for name, value in sizes.items():
        of_table = getattr(table, name)
        if of_table != value:
            raise ConfigError(
                f"pipeline.schedule={kind!r} has other {name}",
                asked=f"{name}={value} of the run",
                found=f"{name}={of_table}",
                fix="mesh.pipeline, pipeline.chunks and "
                "train.global_batch / train.microbatch as in the file",
            )
    return table


def pipeline_schedule(
    config: RunConfig, layout: StageLayout, accumulation: int, frozen: int
) -> Table:
    """Returns the schedule that a run with several stages asks for.

    `accumulation`: its microbatches. Chunks that lie wholly among the first `frozen` layers have no
    backward.
    """
    settings = config.pipeline
    table = choose_table(settings.schedule, layout.stages, settings.chunks, accumulation)
    if table.split and config.train.remat != "none":
        raise ConfigError(
            f"train.remat={config.train.remat!r}: {settings.schedule!r} splits a layer's backward "
            "in two",
            fix="--set train.remat=none",
        )
    return without_backward_of(table, frozen // layout.per_chunk)
