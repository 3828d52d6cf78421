"""Estimates the time and memory of a run: `spmdtrain estimate`. Start reading this room here.

The settings become a `Workload`, a `Hardware` and a `Software`; step_time.py and memory.py make the
two numbers from them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spmdtrain.checkpoints.intervals import CheckpointPlan, plan_checkpoints
from spmdtrain.config.arguments import as_whole
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, check_config
from spmdtrain.planner.cost.hardware import Hardware, described, devices_per_host, swept
from spmdtrain.planner.cost.memory import Memory, exact_state, step_memory
from spmdtrain.planner.cost.overlap import hidden_shares
from spmdtrain.planner.cost.software import Software, software
from spmdtrain.planner.cost.step_time import StepTime, step_time
from spmdtrain.planner.cost.workload import Workload, workload_of
from spmdtrain.planner.own_model import OwnModel

if TYPE_CHECKING:
    from spmdtrain.train.updates.optimizers import Optimizer

MOST_LAID_OUT = 2**20  # devices that are laid out one by one
# Bytes/s from a device into its host's memory: PCIe 4 x16, less overhead.
TO_HOST_BANDWIDTH = 25e9


@dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of one step."""

    time: StepTime
    memory: Memory

    @property
    def workload(self) -> Workload:
        return self.time.workload

    @property
    def hardware(self) -> Hardware:
        return self.time.hardware

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.hardware)

    @property
    def checkpoints(self) -> CheckpointPlan:
        """The number of steps between saves that loses the least time.

        A save stops the run while the state is copied to the host; writing then continues in the
        background.
        """
        state = self.memory.parameters + self.memory.optimizer
        return plan_checkpoints(
            step_seconds=self.time.seconds,
            save_seconds=state / TO_HOST_BANDWIDTH,
            devices=self.workload.mesh.devices,
        )

    def as_compiled(self, traffic: Sequence[Mapping[str, Any]]) -> "Estimate":
        """Returns the estimate with what the compiled step hides of its traffic (`hlo.traffic`)."""
        workload = self.workload
        shares = hidden_shares(
            traffic,
            pipelined=workload.mesh.pipeline > 1,
            collective_matmul=workload.collective_matmul,
        )
        software = self.time.software
        compiled = replace(software, overlap=replace(software.overlap, **shares))
        if "data" in shares:
            compiled = replace(compiled, written_out_overlap=0.0)  # the step itself has told
        time = step_time(workload, self.hardware, compiled)
        return replace(self, time=replace(time, scale=self.time.scale))

    def scaled(self, scale: float) -> "Estimate":
        """Returns the estimate with all times multiplied by `scale` (anchor.py)."""
        return replace(self, time=replace(self.time, scale=scale))


def estimate(
    config: RunConfig,
    devices: int | None,
    hardware: Hardware | str | Path,
    *,
    optimizer: "Optimizer | None" = None,
) -> Estimate:
    """Estimates time and memory of this config, in exactly its layout, on `devices` devices.

    `devices` defaults to the product of the mesh axes. `hardware` may be a name, e.g. "h200", or a
    TOML file. The memory includes the state of `optimizer`, if one is passed as to `run`. Raises
    ConfigError for whatever a run would refuse.
    """
    check_config(config)
    config = with_vocab(config)
    hardware = described(hardware)
    return estimate_on_mesh(config, mesh_sizes(config, devices, hardware), hardware, optimizer)


def estimate_on_mesh(
    config: RunConfig,
    sizes: Mapping[str, int],
    hardware: Hardware,
    optimizer: "Optimizer | None" = None,
) -> Estimate:
    """Estimates as `estimate` does, on a mesh of these sizes (none may be -1)."""
    state = exact_state(config, sizes, optimizer)
    workload = workload_of(config, sizes, hardware.device_kind)
    resident = None
    if config.model.make:
        own = OwnModel(config, optimizer)
        resident = own.state(workload).resident
        workload = workload.with_settings(model=own.shape)
    time = step_time(workload, hardware, our_software(config, hardware))
    return Estimate(time, step_memory(workload, state, resident))


def sweep(
    config: RunConfig, devices: int | None, hardware: Hardware, request: str
) -> tuple[str, Sequence[tuple[float, Estimate]]]:
    """Estimates at several values of one figure of the hardware.

    `request` has the form "hardware.memory_bandwidth=2e12,3e12". Returns the figure's name, and
    each value with its estimate.
    """
    key, _, values = request.removeprefix("hardware.").partition("=")
    if not request.startswith("hardware.") or not values:
        raise ConfigError(
            f"--sweep {request}", fix="--sweep hardware.memory_bandwidth=2e12,3e12,4e12"
        )
    config = with_vocab(config)
    rows = []
    for text in values.split(","):
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"--sweep {request}: {text!r} is not a number") from None
        rows.append((value, estimate(config, devices, swept(hardware, key, value))))
    return key, rows


# From settings to a workload


def with_vocab(config: RunConfig) -> RunConfig:
    """Returns the config with its vocabulary, read from the corpus if the config lacks it."""
    if config.model.vocab:
        return config
    from spmdtrain.data.corpus import find_vocab

    return config.with_vocab(find_vocab(config.data, config.train.seed))


def mesh_sizes(config: RunConfig, devices: int | None, hardware: Hardware) -> dict[str, int]:
    """Returns the sizes of the mesh axes, with -1 filled in, on hosts of equal size.

    Refuses a mesh that a run on these devices would refuse, by calling the same function.
    """
    from spmdtrain.parallel.mesh import AXES, arrange

    sizes = config.mesh.sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    if open_axis is not None and devices is None:
        raise ConfigError(
            f"mesh.{open_axis}=-1 fills the mesh", fix=f"--devices N, a multiple of {fixed}"
        )
    count = as_whole(fixed if devices is None else devices, "devices", 1, MOST_LAID_OUT)
    per_host = devices_per_host(count, hardware)
    stand_ins = [
        SimpleNamespace(
            id=number,
            process_index=number // per_host,
            device_kind=hardware.name,
            platform="gpu",
        )
        for number in range(count)
    ]
    arranged = arrange(sizes, stand_ins, config.origin)
    return dict(zip(AXES, arranged.shape, strict=True))


def our_software(config: RunConfig, hardware: Hardware) -> Software:
    """Returns the constants of this framework.

    Attention is one kernel on NVIDIA's GPUs, cuDNN's or ours. Elsewhere XLA computes it in tiles
    and writes the scores to memory.
    """
    narrow = config.precision.compute != "float32"
    amd = hardware.name.startswith("mi")
    fused = config.model.attention != "xla" and narrow and not amd
    return software("spmdtrain" if fused else "spmdtrain-xla", hardware.name)
