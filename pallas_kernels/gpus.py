"""Lists GPUs in one table: names, peaks, memory, links, and what XLA needs to compile for each.

Kernels, training and the planner read it: a new chip is one entry in GPUS. What depends on the
machine around a chip (its network, the number of chips in a host), or on software, is not here.

Units: FLOP/s of dense matmuls (no sparsity), bytes, bytes/s, watts. Links are one direction per
device.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class XlaTarget:
    """The figures of a chip that only XLA's compiler needs."""

    shared_memory_per_core: int  # bytes
    shared_memory_per_block: int  # bytes
    l2_cache: int  # bytes
    float32_units_per_core: int
    description: str  # the device_kind of a device that is compiled for


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One chip as sold."""

    name: str  # on our command lines
    device_kinds: tuple[str, ...]  # jax's `device_kind` of it
    # Kernels use the tensor memory of "blackwell"; "blackwell rtx" has none.
    generation: str
    compute_capability: tuple[int, int] | None  # None: not from NVIDIA
    bfloat16: float
    float32: float  # of float32 matmuls as jax runs them by default (TF32 on NVIDIA)
    cores: int  # streaming multiprocessors, compute units
    memory: float  # that the driver offers
    memory_bandwidth: float
    link_bandwidth: float  # to the GPUs of its host
    power: float
    float8: float | None = None  # None: it multiplies no 8-bit floats
    mxfp8: float | None = None  # None: it does not scale their blocks (OCP MX)
    sheet: str  # the source of these figures
    sources: Mapping[str, str] = field(
        default_factory=dict, compare=False
    )  # of those that have another
    xla: XlaTarget | None = None  # None: XLA cannot compile for it unless it is present


SPECS = "device_memory_size of openxla/xla, xla/backends/gpu/target_config/specs"

# Said of figures that nobody has held against a document of NVIDIA yet.
UNCHECKED = "not yet checked against NVIDIA's own sheet"
TOTAL_CAPACITY = "total capacity as PyTorch's errors of memory print it"

A100_TARGET = XlaTarget(
    shared_memory_per_core=167936,
    shared_memory_per_block=166912,
    l2_cache=41943040,
    float32_units_per_core=64,
    description="NVIDIA A100-SXM4-80GB",
)
H100_TARGET = XlaTarget(
    shared_memory_per_core=233472,
    shared_memory_per_block=232448,
    l2_cache=52428800,
    float32_units_per_core=128,
    description="NVIDIA H100",
)
H200_TARGET = XlaTarget(
    shared_memory_per_core=233472,
    shared_memory_per_block=232448,
    l2_cache=52428800,
    float32_units_per_core=128,
    description="NVIDIA H200",
)
B200_TARGET = XlaTarget(
    shared_memory_per_core=233472,
    shared_memory_per_block=232448,
    l2_cache=132644864,
    float32_units_per_core=128,
    description="NVIDIA B200",
)
GB200_TARGET = XlaTarget(
    shared_memory_per_core=233472,
    shared_memory_per_block=232448,
    l2_cache=132644864,
    float32_units_per_core=128,
    description="NVIDIA GB200",
)

_ALL = (
    Gpu(
        name="a100-40",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
        generation="ampere",
        compute_capability=(8, 0),
        bfloat16=312e12,
        float32=156e12,
        cores=108,
        memory=42.3e9,
        memory_bandwidth=1555e9,
        link_bandwidth=300e9,
        power=400,
        sheet="NVIDIA A100 data sheet (SXM4 40 GB)",
        sources={"link_bandwidth": "NVLink 3: 600 GB/s both ways"},
        xla=A100_TARGET,
    ),
    Gpu(
        name="a100-80",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        generation="ampere",
        compute_capability=(8, 0),
        bfloat16=312e12,
        float32=156e12,
        cores=108,
        memory=85_100_068_864,
        memory_bandwidth=2039e9,
        link_bandwidth=300e9,
        power=400,
        sheet="NVIDIA A100 data sheet (SXM4 80 GB)",
        sources={"memory": SPECS, "link_bandwidth": "NVLink 3: 600 GB/s both ways"},
        xla=A100_TARGET,
    ),
    Gpu(
        name="h100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        generation="hopper",
        compute_capability=(9, 0),
        bfloat16=989.4e12,
        float8=1978.9e12,
        float32=494.7e12,
        cores=132,
        memory=84_942_979_072,
        memory_bandwidth=3352e9,
        link_bandwidth=450e9,
        power=700,
        sheet="NVIDIA H100 data sheet (SXM5), dense",
        sources={"memory": SPECS, "link_bandwidth": "NVLink 4: 900 GB/s both ways"},
        xla=H100_TARGET,
    ),
    Gpu(
        name="h100-pcie",
        device_kinds=("NVIDIA H100 PCIe",),
        generation="hopper",
        compute_capability=(9, 0),
        bfloat16=756e12,
        float8=1513e12,
        float32=378e12,
        cores=114,
        memory=84.9e9,
        memory_bandwidth=2039e9,
        link_bandwidth=64e9,
        power=350,
        sheet="NVIDIA H100 data sheet (PCIe), dense",
        sources={"link_bandwidth": "PCIe 5 x16, no bridge"},
        xla=H100_TARGET,
    ),
    Gpu(
        name="h200",
        device_kinds=("NVIDIA H200",),
        generation="hopper",
        compute_capability=(9, 0),
        bfloat16=989.4e12,
        float8=1978.9e12,
        float32=494.7e12,
        cores=132,
        memory=151_397_597_184,
        memory_bandwidth=4800e9,
        link_bandwidth=450e9,
        power=700,
        sheet="NVIDIA H200 data sheet (SXM), dense",
        sources={"memory": SPECS, "link_bandwidth": "NVLink 4: 900 GB/s both ways"},
        xla=H200_TARGET,
    ),
    Gpu(
        name="b200",
        device_kinds=("NVIDIA B200",),
        generation="blackwell",
        compute_capability=(10, 0),
        bfloat16=2250e12,
        float8=4500e12,
        mxfp8=4500e12,
        float32=1125e12,
        cores=148,
        memory=191.5e9,
        memory_bandwidth=7672e9,
        link_bandwidth=900e9,
        power=1000,
        sheet="NVIDIA Blackwell (HGX B200) data sheet, dense",
        sources={"memory_bandwidth": SPECS, "link_bandwidth": "NVLink 5: 1800 GB/s"},
        xla=B200_TARGET,
    ),
    Gpu(
        name="gb200",
        device_kinds=("NVIDIA GB200",),
        generation="blackwell",
        compute_capability=(10, 0),
        bfloat16=2500e12,
        float8=5000e12,
        mxfp8=5000e12,
        float32=1250e12,
        cores=148,
        memory=197.5e9,
        memory_bandwidth=8000e9,
        link_bandwidth=900e9,
        power=1200,
        sheet="NVIDIA GB200 NVL72 data sheet, dense, per GPU",
        xla=GB200_TARGET,
    ),
    Gpu(
        name="rtx-4090",
        device_kinds=("NVIDIA GeForce RTX 4090",),
        generation="ada",
        compute_capability=(8, 9),
        bfloat16=165.2e12,
        float8=330.3e12,
        float32=82.6e12,
        cores=128,
        memory=25.4e9,
        memory_bandwidth=1008e9,
        link_bandwidth=32e9,
        power=450,
        sheet=f"GeForce RTX 4090, dense, float32 accumulation; {UNCHECKED}",
        sources={"memory": TOTAL_CAPACITY, "link_bandwidth": "PCIe 4 x16, no bridge"},
    ),
    Gpu(
        name="rtx-5090",
        device_kinds=("NVIDIA GeForce RTX 5090",),
        generation="blackwell rtx",
        compute_capability=(12, 0),
        bfloat16=209.5e12,
        float8=419e12,
        float32=104.8e12,
        cores=170,
        memory=33.7e9,
        memory_bandwidth=1792e9,
        link_bandwidth=64e9,
        power=575,
        sheet=f"GeForce RTX 5090, dense, float32 accumulation; {UNCHECKED}",
        sources={"memory": TOTAL_CAPACITY, "link_bandwidth": "PCIe 5 x16, no bridge"},
    ),
    Gpu(
        name="l40s",
        device_kinds=("NVIDIA L40S",),
        generation="ada",
        compute_capability=(8, 9),
        bfloat16=362.05e12,
        float8=733e12,
        float32=183e12,
        cores=142,
        memory=47.7e9,
        memory_bandwidth=864e9,
        link_bandwidth=32e9,
        power=350,
        sheet=f"L40S, dense; {UNCHECKED}",
        sources={"memory": TOTAL_CAPACITY, "link_bandwidth": "PCIe 4 x16, no bridge"},
    ),
    Gpu(
        name="rtx-6000-ada",
        device_kinds=("NVIDIA RTX 6000 Ada Generation",),
        generation="ada",
        compute_capability=(8, 9),
        bfloat16=364.2e12,
        float8=728.5e12,
        float32=182.1e12,
        cores=142,
        memory=51.0e9,
        memory_bandwidth=960e9,
        link_bandwidth=32e9,
        power=300,
        sheet=f"RTX 6000 Ada, dense, float32 accumulation; {UNCHECKED}",
        sources={"memory": TOTAL_CAPACITY, "link_bandwidth": "PCIe 4 x16, no bridge"},
    ),
    Gpu(
        name="rtx-pro-6000",
        device_kinds=(
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        ),
        generation="blackwell rtx",
        compute_capability=(12, 0),
        bfloat16=503.8e12,
        float8=1007.6e12,
        float32=251.9e12,
        cores=188,
        memory=102.0e9,
        memory_bandwidth=1792e9,
        link_bandwidth=64e9,
        power=600,
        sheet=f"RTX PRO 6000, dense; {UNCHECKED}",
        sources={"memory": TOTAL_CAPACITY, "link_bandwidth": "PCIe 5 x16, no bridge"},
    ),
    Gpu(
        name="mi300x",
        device_kinds=("AMD Instinct MI300X",),
        generation="cdna3",
        compute_capability=None,
        bfloat16=1307.4e12,
        float8=2614.9e12,
        float32=653.7e12,
        cores=304,
        memory=205.8e9,
        memory_bandwidth=5300e9,
        link_bandwidth=448e9,
        power=750,
        sheet="AMD Instinct MI300X data sheet, dense",
        sources={"link_bandwidth": "7 Infinity Fabric links of 64 GB/s"},
    ),
)
GPUS = {gpu.name: gpu for gpu in _ALL}

BEFORE_AMPERE = "before ampere"

# Generations of NVIDIA GPUs that have no entry above, by the words of their device_kind.
_UNLISTED = {
    BEFORE_AMPERE: r"K80|M40|M60|P4|P40|P100|V100S?|T4|T1000|TITAN"
    r"|GTX|GeForce RTX 20\d\d|Quadro RTX",
    "ampere": r"A(30|100|800)",
    "ada": r"L4|L40|L20|GeForce RTX 40\d\d|RTX \d000 Ada|RTX \d000 SFF Ada",
    "blackwell rtx": r"GeForce RTX 50\d\d|RTX PRO \d000 Blackwell",
    "hopper": r"G?H(20|100|200|800)",
    "blackwell": r"G?B[123]00",
}
_NVIDIA = ("NVIDIA", "Tesla", "Quadro", "TITAN")  # words of a device_kind


def find(device_kind: str) -> Gpu | None:
    """Returns the entry of a device that jax calls `device_kind`."""
    for gpu in GPUS.values():
        if device_kind in gpu.device_kinds:
            return gpu
    return None


def generation(device_kind: str) -> str:
    """Returns the generation of a GPU, listed or not: "hopper"; "" if its name does not tell."""
    if listed := find(device_kind):
        return listed.generation
    for name, words in _UNLISTED.items():
        if re.search(rf"\b({words})\b", device_kind):
            return name
    return ""


def is_nvidia(device_kind: str) -> bool:
    if listed := find(device_kind):
        return listed.compute_capability is not None
    return any(word in device_kind for word in _NVIDIA)


def xla_target(gpu: Gpu) -> str:
    """Returns the text of XLA's GpuTargetConfigProto, with which it compiles for an absent GPU."""
    assert gpu.xla is not None and gpu.compute_capability is not None, gpu.name
    major, minor = gpu.compute_capability
    capability = f"major: {major}"
    if minor:
        capability += f" minor: {minor}"
    if major >= 9:  # sm_90a, sm_100a: wgmma and its successors
        capability += " feature_extension: ACCELERATED_FEATURES"
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.xla.shared_memory_per_core}
  shared_memory_per_block_optin: {gpu.xla.shared_memory_per_block} threads_per_core_limit: 2048
  core_count: {gpu.cores} fpus_per_core: {gpu.xla.float32_units_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {gpu.memory_bandwidth:.0f} l2_cache_size: {gpu.xla.l2_cache} clock_rate_ghz: 1.8
  device_memory_size: {gpu.memory:.0f}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ {capability} }} driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.28.0"
  device_interconnect_info {{ active_links: 18 }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 28 }} runtime_version {{ major: 13 }}
device_description_str: "{gpu.xla.description}"
"""
