"""Compiles the real step for absent GPUs, to get XLA's own figures of memory and collectives.

Needs jax's CUDA plugin and the compiler wheels, but no driver and no GPU: `pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm`, of the versions of the installed
jax. Call `set_xla_flags(deviceless=True)` before jax starts, or some layouts end the process
(processes/xla_flags.py). Nothing is autotuned without a device, so temporary bytes and kernels
differ a little from a compile on the GPU.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pallas_kernels import gpus
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner.cost.hardware import Hardware, devices_per_host
from spmdtrain.planner.cost.memory import host_bytes
from spmdtrain.planner.cost.workload import workload_of


def compile_step(config: RunConfig, sizes: Mapping[str, int], device: Hardware) -> dict[str, Any]:
    """Compiles the step; returns the contents of RUN/compiled.json, "overlap" and "traffic".

    They come from hlo.report, hlo.overlaps and hlo.traffic. The last two are None if the text does
    not show them, e.g. because a loop has no known trip count; `unread` is the reason.
    `model.vocab` must be set.
    """
    from spmdtrain.compiled import hlo

    start = time.perf_counter()
    made, mesh = executable(config, sizes, device)
    report = hlo.report(made, mesh, time.perf_counter() - start)
    # A device that is not there has one kind of memory: what rests on the host counts as its own.
    if config.optimizer.memory == "host":
        elsewhere = host_bytes(workload_of(config, sizes))
        for part in ("argument_bytes", "output_bytes", "alias_bytes"):
            report["memory"][part] -= elsewhere
    text = made.as_text()
    axes = dict(mesh.shape)
    try:
        return report | {"overlap": hlo.overlaps(text, axes), "traffic": hlo.traffic(text, axes)}
    except hlo.UNREADABLE as error:
        return report | {"overlap": None, "traffic": None, "unread": str(error)}


def executable(config: RunConfig, sizes: Mapping[str, int], device: Hardware) -> tuple[Any, Any]:
    """Returns (the compiled step, a jax.stages.Compiled that cannot run; its mesh)."""
    import jax

    from spmdtrain.train.shard import shard
    from spmdtrain.train.step import make_step

    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
    setup = shard(config, devices=described_devices(device, math.prod(sizes.values())))
    with jax.sharding.use_abstract_mesh(setup.mesh.abstract_mesh):
        return make_step(setup).lower(setup.state, setup.batch).compile(), setup.mesh


def described_devices(device: Hardware, count: int) -> list[Any]:
    """Returns `count` such devices, host by host, to compile for; they cannot run anything."""
    from jax.experimental import topologies

    per_host = devices_per_host(count, device)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target(device),
            topology=f"1x{count // per_host}x{per_host}",
        )
    except Exception as error:  # the type of error depends on what is missing
        raise ConfigError(
            f"cannot compile for {device.name} here: {str(error).splitlines()[0]}",
            fix="make cuda-compiler, or pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt "
            "nvidia-cuda-nvcc nvidia-nvvm, of the versions of the jax in use",
        ) from None
    return list(topology.devices)


def target(device: Hardware) -> str:
    """Returns the GpuTargetConfigProto text of the device.

    Its chip is found by name; for hardware from a file, by the first part of the name.
    """
    chips = {name: gpu for name, gpu in gpus.GPUS.items() if gpu.xla is not None}
    family = device.name.partition("-")[0]
    alike = [gpu for name, gpu in chips.items() if name.partition("-")[0] == family]
    chip = chips.get(device.name) or next(iter(alike), None)
    if chip is None:
        raise ConfigError(
            f"XLA's compiler for {device.name} is not described here", found=", ".join(chips)
        )
    own = replace(
        chip, cores=device.cores, memory_bandwidth=device.memory_bandwidth, memory=device.memory
    )
    return gpus.xla_target(own)
