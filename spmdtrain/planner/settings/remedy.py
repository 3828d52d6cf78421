"""Finds the cheapest change of settings that makes a run out of memory fit."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.axes import batch_shards
from spmdtrain.planner.cost.memory import closed_form_state, step_memory
from spmdtrain.planner.cost.workload import may_move, workload_of

ROOM = 0.97  # of the available memory, since predictions are a few per cent off


def cheapest_change(config: RunConfig, sizes: Mapping[str, int], share: float) -> list[str]:
    """Returns settings, for `--set`, that reduce the memory of a step to at most `share`.

    `sizes` are those of the mesh; `model.vocab` must be set. Empty if no change is enough. The
    cheapest change comes first: smaller microbatches, then the optimizer state split over `data`,
    weights over `fsdp`, then recomputation, and finally moments on the host.
    """
    now = _bytes(config, sizes)
    values = resolved(config)
    for changes in _candidates(config, sizes):
        settings = [f"{name}={value}" for name, value in changes.items()]
        try:
            changed = from_resolved(values, settings)
        except ConfigError:
            continue  # a run would refuse it
        if _bytes(changed, dict(sizes) | _of_mesh(changes)) <= ROOM * share * now:
            return settings
    return []


def _candidates(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yields changes, cheapest first."""
    train = config.train
    shards = batch_shards(sizes)
    whole = train.microbatch or train.global_batch // shards
    micro = [size for size in range(whole - 1, 0, -1) if whole % size == 0]
    microbatches = [{}, *({"train.microbatch": size} for size in micro)]
    weights: list[dict[str, Any]] = [{}]
    if sizes["data"] > 1:
        if not train.zero:
            weights.append({"train.zero": 1})
        fsdp = sizes["data"] * sizes["fsdp"]
        if config.model.embed % fsdp == 0:
            weights.append({"train.zero": 0, "mesh.data": 1, "mesh.fsdp": fsdp})
    remats: list[dict[str, Any]] = [{}]
    if config.pipeline.schedule != "zero_bubble" or sizes["pipeline"] == 1:
        order = ["none", "dots", "full"]
        if sizes["pipeline"] == 1:
            order.append("offload")
        more = order[order.index(train.remat) + 1 :]
        remats += [{"train.remat": remat} for remat in more]
    moments: list[dict[str, Any]] = [{}]
    if may_move(config) and config.optimizer.memory == "device":
        moments.append({"optimizer.memory": "host"})
    for moment, remat, weight, microbatch in product(moments, remats, weights, microbatches):
        if changes := weight | microbatch | remat | moment:
            yield changes


def _of_mesh(changes: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of mesh axes among the changes, by axis."""
    return {
        name.removeprefix("mesh."): size
        for name, size in changes.items()
        if name.startswith("mesh.")
    }


def _bytes(config: RunConfig, sizes: Mapping[str, int]) -> int:
    """Returns the predicted bytes of the fullest device, all from closed forms, to compare them."""
    workload = workload_of(config, sizes)
    return step_memory(workload, closed_form_state(workload)).total
