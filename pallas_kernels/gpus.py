"""What XLA wants to know of an NVIDIA GPU to compile for it where it is not: the text of a GpuTargetConfigProto."""

# Compute capability; shared memory per core and per block; L2 bytes; fp32 units per core; the name XLA knows.
CHIPS = {
    "a100": ("major: 8", 167936, 166912, 41943040, 64, "NVIDIA A100-SXM4-80GB"),
    "h100": ("major: 9 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 52428800, 128, "NVIDIA H100"),
    "h200": ("major: 9 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 52428800, 128, "NVIDIA H200"),
    "b200": ("major: 10 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 132644864, 128, "NVIDIA B200"),
    "gb200": ("major: 10 feature_extension: ACCELERATED_FEATURES", 233472, 232448, 132644864, 128, "NVIDIA GB200"),
}


def target(chip: str, *, cores: int, memory_bandwidth: float, memory: float) -> str:
    """Of a chip in CHIPS with so many cores, bytes per second and bytes."""
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
