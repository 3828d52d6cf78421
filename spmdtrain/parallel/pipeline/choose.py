"""The table that a run's settings ask for: of a schedule with a name, or of a file."""

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.pipeline import file, schedule
from spmdtrain.parallel.pipeline.schedule import Table


def choose_table(kind: str, stages: int, chunks: int, microbatches: int) -> Table:
    """`kind` is a name in schedule.KINDS, built in these sizes, or a file, which must have them."""
    if kind in schedule.KINDS:
        return schedule.build(kind, stages, microbatches, chunks)
    table = file.read(kind)
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if getattr(table, name) != value:
            raise ConfigError(
                f"pipeline.schedule={kind!r} is for other {name}",
                asked=f"{name}={value} of the run",
                found=f"{name}={getattr(table, name)}",
                fix="mesh.pipeline, pipeline.chunks and train.global_batch / train.microbatch as in the file",
            )
    return table
