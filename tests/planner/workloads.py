"""Runs that no file of settings describes, as a test writes them down."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from spmdtrain.config.schema import GPT, RunConfig, TransformerConfig
from spmdtrain.planner.cost.workload import Workload

# With rotary positions, which no table holds.
gpt = partial(GPT, positions="rope")


def workload_with(
    model: TransformerConfig,
    sequence_length: int,
    global_batch: int,
    matmul: str = "compute",
    compression: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    **layout: Any,
) -> Workload:
    """A run of the model in bfloat16, in a layout that `Workload` describes."""
    settings = {
        "train": {"sequence_length": sequence_length, "global_batch": global_batch},
        "precision": {"compute": "bfloat16", "matmul": matmul},
        "compression": compression or {},
        "optimizer": {"name": optimizer},
    }
    return Workload(RunConfig(model=model, **settings), **layout)
