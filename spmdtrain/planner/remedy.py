"""The cheapest change of settings by which a run that is out of memory fits."""

from collections.abc import Iterator, Mapping
from typing import Any

from spmdtrain.config.schema import RunConfig
from spmdtrain.planner.cost.memory import closed_form_state, step_memory
from spmdtrain.planner.cost.workload import workload_of

ROOM = 0.97  # of the memory that is there, as predictions are a few per cent off


def cheapest_change(config: RunConfig, sizes: Mapping[str, int], share: float) -> list[str]:
    """Settings, as `--set` takes them, by which a step needs at most `share` of what it needs now.

    `sizes` are those of the mesh; `model.vocab` must be set. Empty where nothing that is tried is
    enough. What costs least comes first: smaller microbatches, then the optimizer state split over
    `data`, weights over `fsdp`, and at last recomputation.
    """
    now = _bytes(config, sizes)
    for changes in _candidates(config, sizes):
        changed, on_sizes = _changed(config, sizes, changes)
        if _bytes(changed, on_sizes) <= ROOM * share * now:
            return [f"{name}={value}" for name, value in changes.items()]
    return []


def _candidates(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Changes, those that cost least first."""
    train = config.train
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
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
        order = ("none", "dots", "full")
        more = order[order.index(train.remat) + 1 :]
        remats += [{"train.remat": remat} for remat in more]
    for remat in remats:
        for weight in weights:
            for microbatch in microbatches:
                if remat or weight or microbatch:
                    yield weight | microbatch | remat


def _changed(
    config: RunConfig, sizes: Mapping[str, int], changes: Mapping[str, Any]
) -> tuple[RunConfig, dict[str, int]]:
    of_train = {
        name.removeprefix("train."): value
        for name, value in changes.items()
        if name.startswith("train.")
    }
    of_mesh = {
        name.removeprefix("mesh."): value
        for name, value in changes.items()
        if name.startswith("mesh.")
    }
    train = config.train.model_copy(update=of_train)
    return config.model_copy(update={"train": train}), dict(sizes) | of_mesh


def _bytes(config: RunConfig, sizes: Mapping[str, int]) -> int:
    """Predicted bytes of the fullest device, all by closed forms, so that they compare."""
    workload = workload_of(config, sizes)
    return step_memory(workload, closed_form_state(workload)).total
