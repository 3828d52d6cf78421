"""NVIDIA's GPUs: which generation a name means, and what XLA wants to know of one to compile for it where it is not."""

import re

# As jax names a device ("NVIDIA H200"), by what kernels ask: sm_80 or later at all, sm_90, sm_100 and up.
GENERATIONS = {
    "old": r"K80|M40|M60|P4|P40|P100|V100S?|T4|T1000|GTX|GeForce RTX 20\d\d|Quadro RTX|TITAN",
    "hopper": r"G?H(20|100|200|800)",
    "blackwell": r"G?B[123]00",
}

# Compute capability; shared memory per core and per block; L2 bytes; fp32 units per core; the name XLA knows.
CHIPS = {
    "a100": ("major: 8", 167936, 166912, 41943040, 64, "NVIDIA A100-SXM4-80GB"),
    "h100": ("major: 9 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 52428800, 128, "NVIDIA H100"),
    "h200": ("major: 9 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 52428800, 128, "NVIDIA H200"),
    "b200": ("major: 10 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 132644864, 128, "NVIDIA B200"),
    "gb200": ("major: 10 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 132644864, 128, "NVIDIA GB200"),
}


def generation(kind: str) -> str:
    """One of GENERATIONS, of a device of that kind; "" for the others: Ampere, Ada, and what is no NVIDIA GPU."""
    return next((name for name, kinds in GENERATIONS.items() if re.search(rf"\b({kinds})\b", kind)), "")


def target(chip: str, *, cores: int, memory_bandwidth: float, memory: float) -> str:
    """The text of a GpuTargetConfigProto: of a chip in CHIPS with so many cores, bytes per second and bytes."""
    capability, per_core, per_block, cache, units, name = CHIPS[chip]
    return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {per_core} shared_memory_per_block_optin: {per_block} threads_per_core_limit: 2048
  core_count: {cores} fpus_per_core: {units} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {memory_bandwidth:.0f} l2_cache_size: {cache} clock_rate_ghz: 1.8
  device_memory_size: {memory:.0f} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ {capability} }} driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.28.0" device_interconnect_info {{ active_links: 18 }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 28 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
