"""The settings of each strategy: its mesh, and the few settings that follow from the mesh.

The model, the samples and their batches stay those of the run, so all strategies train the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spmdtrain.config import RunConfig, from_resolved, resolved
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.near import did_you_mean
from spmdtrain.config.schema import MESH_AXES
from spmdtrain.parallel.axes import batch_shards

CONFIGURED = "configured"


@dataclass(frozen=True)
class Cluster:
    """A number of devices, with `per_host` of them on each host."""

    devices: int
    per_host: int


def _data(_: RunConfig, cluster: Cluster) -> dict[str, int]:
    return {"data": cluster.devices}


def _fsdp(_: RunConfig, cluster: Cluster) -> dict[str, int]:
    return {"fsdp": cluster.devices}


def _tensor(config: RunConfig, cluster: Cluster) -> dict[str, int]:
    heads = config.model.kv_heads
    ways = math.gcd(heads, cluster.per_host)
    if ways == 1:
        raise ConfigError(
            f"no number divides both the {_heads(heads)} and the {cluster.per_host} devices of a "
            "host"
        )
    return {"data": cluster.devices // ways, "tensor": ways}


def _heads(count: int) -> str:
    return f"{count} heads of the keys" if count > 1 else "only head of the keys"


def _pipeline(config: RunConfig, cluster: Cluster) -> dict[str, int]:
    stages = math.gcd(config.model.layers, cluster.devices)
    if stages == 1:
        raise ConfigError(
            f"no number divides both the {config.model.layers} layers and the {cluster.devices} "
            "devices"
        )
    return {"pipeline": stages, "data": cluster.devices // stages}


@dataclass(frozen=True)
class Strategy:
    """A strategy: its meaning in a line, and the sizes of the mesh axes that it uses."""

    says: str
    sizes: Callable[[RunConfig, Cluster], dict[str, int]]
    zero: int = 0


STRATEGIES = {
    "single": Strategy("one device alone takes the whole batch", lambda *_: {}),
    "ddp": Strategy("each device has the whole model, and a share of the batch", _data),
    "zero1": Strategy("ddp, with gradients and optimizer state split (ZeRO-1)", _data, zero=1),
    "fsdp": Strategy("weights split too, gathered layer by layer where they are used", _fsdp),
    "tensor": Strategy("matmuls split over the devices of a host that divide the heads", _tensor),
    "pipeline": Strategy("layers split into as many stages as divide them, by 1F1B", _pipeline),
}
NAMES = (*STRATEGIES, CONFIGURED)
DEFAULT = tuple(name for name in STRATEGIES if name != "single")


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError for a strategy that does not exist, or that is named twice."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(
                f"unknown strategy{did_you_mean(name, NAMES)}",
                asked=f"{name:.80}",
                fix=", ".join(NAMES),
            )
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named twice", fix="each strategy once")


def compared_run(config: RunConfig) -> RunConfig:
    """Returns the run whose steps are compared: that of the last stage.

    Raises ConfigError for one of several that train together.
    """
    config.check_alone()
    values = config.as_given()
    values["train"] |= {"stages": []}
    values["optimizer"] |= {"rate_by_batch": "none"}
    return from_resolved({"config": values, "origin": config.origin})


def settings_of(name: str, config: RunConfig, cluster: Cluster) -> list[str]:
    """Returns the settings that a strategy changes, as arguments of `--set`.

    The microbatch is that of the run, or else the largest one below it that divides the sequences
    of a shard. A pipeline of a run that sets none has microbatches of one sequence. Raises
    ConfigError if the strategy has no mesh on these devices.
    """
    if name == CONFIGURED:
        return []
    strategy = STRATEGIES[name]
    sizes = dict.fromkeys(MESH_AXES, 1) | strategy.sizes(config, cluster)
    settings = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    if sizes["tensor"] == 1 and config.mesh.collective_matmul:
        settings.append("mesh.collective_matmul=false")
    settings.append(f"train.zero={strategy.zero}")
    is_pipeline = sizes["pipeline"] > 1
    if is_pipeline:
        settings += ["pipeline.schedule=1f1b", "pipeline.chunks=1"]
    largest = config.train.microbatch or (1 if is_pipeline else None)
    if largest is not None:
        settings.append(f"train.microbatch={_microbatch(config, batch_shards(sizes), largest)}")
    return settings


def _microbatch(config: RunConfig, shards: int, largest: int) -> int | str:
    """Returns the largest microbatch up to `largest` that divides the sequences of a shard.

    If the shards do not divide the batch it is "none", and the run is refused for that reason.
    """
    whole, rest = divmod(config.train.global_batch, shards)
    if rest:
        return "none"
    return max(size for size in range(1, min(largest, whole) + 1) if whole % size == 0)


def laid_out(name: str, config: RunConfig, cluster: Cluster) -> RunConfig:
    """Returns the run in the layout of a strategy. Raises ConfigError as `settings_of` does."""
    return from_resolved(resolved(config), settings_of(name, config, cluster))


def used_devices(name: str, cluster: Cluster) -> int:
    """Returns the number of devices that a strategy uses."""
    return 1 if name == "single" else cluster.devices
