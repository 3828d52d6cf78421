"""What a configuration means before anything runs: every parameter, where it rests and what it costs per device."""

from typing import Any

from jax.sharding import Mesh

from spmdtrain.config.load import resolved, to_toml
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.corpus import open_corpus
from spmdtrain.models.abstract import MakeModel, build_model
from spmdtrain.models.transformer import Transformer
from spmdtrain.parallel.axes import make_rules
from spmdtrain.parallel.mesh import build_mesh, describe_mesh
from spmdtrain.train.batch import sequences_at_once
from spmdtrain.train.grad_pipeline import describe as describe_pipeline
from spmdtrain.train.grad_pipeline import table_of
from spmdtrain.train.state import abstract_state, bytes_per_device, parameter_specs


def describe(config: RunConfig, make: MakeModel = Transformer) -> tuple[dict[str, Any], Mesh]:
    """Plain values for `show --json`: config, origin, mesh, pipeline (a line, or null), parameters (a row each),
    totals; and the mesh."""
    config = config.with_vocab(config.model.vocab or open_corpus(config.data, None, config.train.seed).vocab)
    mesh = build_mesh(config.mesh, where=config.origin)
    rules = make_rules(config.rules, mesh.shape)
    accumulation, sequences = sequences_at_once(config, rules)
    stages = mesh.shape["pipeline"]
    blueprint = build_model(config, make, stages, config.pipeline.chunks)
    pipeline = describe_pipeline(table_of(config, stages, accumulation), blueprint.layout) if stages > 1 else None
    abstract, specs = abstract_state(config, blueprint, mesh, rules), parameter_specs(blueprint, rules)
    rows = [
        {
            "path": path,
            "shape": list(parameter.shape),
            "logical_axes": list(parameter.axes),
            "mesh_axes": [list(part) if isinstance(part, tuple) else [part] if part else [] for part in specs[path]],
            "dtype": str(abstract.params[path].dtype),
            "bytes_per_device": bytes_per_device(abstract.params[path]),
            "optimizer_bytes_per_device": bytes_per_device(abstract.opt_state[path]),
        }
        for path, parameter in blueprint.parameters.items()
    ]
    totals = {
        "parameters": blueprint.size,
        "bytes_per_device": sum(row["bytes_per_device"] for row in rows),
        "optimizer_bytes_per_device": sum(row["optimizer_bytes_per_device"] for row in rows),
        "accumulation": accumulation,
        "sequences_at_once": sequences,
    }
    found = {"mesh": dict(mesh.shape), "pipeline": pipeline, "parameters": rows, "totals": totals}
    return resolved(config) | found, mesh


def show(config: RunConfig) -> str:
    """The same for a person."""
    values, mesh = describe(config)
    rows = [("parameter", "shape", "logical axes", "mesh axes", "bytes/device", "optimizer")]
    for row in values["parameters"]:
        mesh_axes = ", ".join("x".join(part) or "-" for part in row["mesh_axes"])
        logical = ", ".join(axis or "-" for axis in row["logical_axes"])
        rows.append((row["path"], " x ".join(map(str, row["shape"])), logical, mesh_axes, *_sizes(row)))
    totals = values["totals"]
    rows.append(("total", f"{totals['parameters']:,} parameters", "", "", *_sizes(totals)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), *map(str.rjust, row[4:], widths[4:])]) for row in rows]
    accumulation, sequences = totals["accumulation"], totals["sequences_at_once"]
    batch = f"batch: {accumulation} x {sequences} sequences of {config.train.sequence_length} tokens"
    pipeline = [f"pipeline: {values['pipeline']}"] if values["pipeline"] else []
    return "\n\n".join([to_toml(config).strip(), describe_mesh(mesh), *pipeline, batch, "\n".join(lines)])


def _sizes(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['bytes_per_device']:,}", f"{row['optimizer_bytes_per_device']:,}"
