"""Shows the resolved configuration of a run before anything runs.

Every parameter is listed with its sharding and its bytes per device.
"""

from typing import Any

from spmdtrain.config.load import resolved, to_toml
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.corpus import find_vocab
from spmdtrain.models.choose import MakeModel
from spmdtrain.parallel.axes import axes_of_dim
from spmdtrain.parallel.mesh import describe_mesh
from spmdtrain.pipeline.draw import describe_pipeline
from spmdtrain.show.layer_list import describe_experts, describe_layers, experts_row, layer_rows
from spmdtrain.train.all_parts import items_named
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard
from spmdtrain.train.state import bytes_per_device


def setup_of(config: RunConfig, make: MakeModel | str | None = None) -> Setup:
    """Returns the setup of a run of `config` on the devices at hand, its vocabulary resolved."""
    vocab = config.model.vocab or find_vocab(config.data, config.train.seed)
    return shard(config.with_vocab(vocab), make)


def describe(
    config: RunConfig, make: MakeModel | str | None = None
) -> tuple[dict[str, Any], Setup]:
    """Returns the plain values of `show --json`, and the setup.

    The values are config, origin, mesh, pipeline (a line, or null), layers (a row for each kind),
    parameters (a row each) and totals.
    """
    setup = setup_of(config, make)
    model = setup.model
    pipeline = None
    if setup.pipeline:
        of_round = len(setup.config.model.stacks[-1].pattern)
        pipeline = describe_pipeline(setup.pipeline, model.stage_layout, of_round)
    abstract, specs = setup.state, setup.specs
    rows = [
        {
            "path": path,
            "shape": list(parameter.shape),
            "logical_axes": list(parameter.axes),
            "mesh_axes": [list(axes_of_dim(part)) for part in specs[path]],
            "dtype": str(abstract.params[path].dtype),
            "bytes_per_device": bytes_per_device(abstract.params[path]),
            "optimizer_bytes_per_device": bytes_per_device(
                [
                    tree.get(path)
                    for tree in (
                        abstract.opt_state,
                        *items_named(abstract.items).by_parameter(abstract.items),
                    )
                ]
            ),
        }
        for path, parameter in model.parameters.items()
    ]
    totals = {
        "parameters": model.size,
        "bytes_per_device": sum(row["bytes_per_device"] for row in rows),
        "optimizer_bytes_per_device": sum(row["optimizer_bytes_per_device"] for row in rows),
        "accumulation": setup.batch_shape.accumulation,
        "sequences_at_once": setup.batch_shape.sequences,
    }
    described = {
        "mesh": dict(setup.mesh.shape),
        "pipeline": pipeline,
        "layers": layer_rows(setup.config.model),
        "experts": experts_row(setup.config.model),
        "parameters": rows,
        "totals": totals,
    }
    return resolved(setup.config) | described, setup


def show(config: RunConfig) -> str:
    """Returns the values of `describe` as readable text."""
    values, setup = describe(config)
    rows = [("parameter", "shape", "logical axes", "mesh axes", "bytes/device", "optimizer")]
    for row in values["parameters"]:
        mesh_axes = ", ".join("x".join(part) or "-" for part in row["mesh_axes"])
        logical = ", ".join(axis or "-" for axis in row["logical_axes"])
        rows.append(
            (row["path"], " x ".join(map(str, row["shape"])), logical, mesh_axes, *_sizes(row))
        )
    totals = values["totals"]
    rows.append(("total", f"{totals['parameters']:,} parameters", "", "", *_sizes(totals)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([*map(str.ljust, row[:4], widths), *map(str.rjust, row[4:], widths[4:])])
        for row in rows
    ]
    accumulation, sequences = totals["accumulation"], totals["sequences_at_once"]
    batch = (
        f"batch: {accumulation} x {sequences} sequences of {config.train.sequence_length} tokens"
    )
    for stage in config.train.timetable[:-1]:
        shape = f"{stage.global_batch} sequences of {stage.sequence_length} tokens"
        frozen = config.in_stage(stage).finetune.frozen_layers
        shape += f", {frozen} layers frozen" if stage.frozen_layers is not None else ""
        batch += f"\nsteps {stage.first + 1} to {stage.last}: {shape}"
    pipeline = [f"pipeline: {values['pipeline']}"] if values["pipeline"] else []
    attention = [setup.context_line] if setup.context_line else []
    model = setup.config.model
    layers = [describe_layers(model), describe_experts(model)] if not config.model.make else []
    settings = to_toml(setup.config).strip()
    mesh = describe_mesh(setup.mesh)
    parts = [settings, mesh, *attention, *pipeline, *filter(None, layers), batch, "\n".join(lines)]
    return "\n\n".join(parts)


def _sizes(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['bytes_per_device']:,}", f"{row['optimizer_bytes_per_device']:,}"
