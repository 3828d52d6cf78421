"""The share of a device's data-sheet figures that training software reaches.

There are few constants. Most are fixed: they come from a kernel's own benchmark, or from counting.
Six are fitted (`FITTED`), by benchmarks/planner/fit.py, to the tables that
benchmarks/planner/split.toml names as training tables. Nothing else is fitted.

`Hardware` (hardware.py) is what a device can do; `Software` is how well one framework uses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spmdtrain.planner.cost.overlap import Overlap, fleet_overlap, saving

# Shares of data-sheet bandwidth.
LINK_SHARE = 0.8  # of ring collectives (NCCL, on NVLink and on InfiniBand)
SEND_SHARE = 0.2  # of that, for one send inside a host: 47 GB/s on A100 (zb_table9)
MEMORY_SHARE = 0.85  # of copies in device memory

# Matmuls.
MATMUL_TILES = (  # rows, columns, share of the best tile's rate
    (256, 128, 1.0),
    (128, 128, 0.94),
    (64, 128, 0.8),
    (64, 64, 0.6),
    (32, 32, 0.25),
)
WAVE_ROUNDING = 0.6  # share of a partly filled last wave of tiles that is waited for
INNER_OVERHEAD = 36  # added to the inner dim: filling and draining a tile's software pipeline
LAUNCH_SECONDS = 5e-6  # of every kernel


@dataclass(frozen=True)
class Software:
    """The constants of one framework."""

    name: str
    matmul_share: float = 0.93  # of the rate that Hardware.matmul x peak gives
    elementwise_factor: float = 1.3  # bytes that elementwise passes move / bytes counted
    score_factor: float = 1.4  # bytes that passes over attention's scores move / bytes counted
    straggler_share: float = 0.008  # of a step, lost per doubling of devices: all wait for one
    host_wait: float = 0.0  # s that a stage waits for its host per microbatch and direction
    attention_share: float = 0.0  # of peak, for fused attention; 0: scores are written to memory
    score_bytes: int = 2  # of one score that is written to memory
    overlap: Overlap = Overlap()  # of transfers with work
    work_beside_gathers: float = 0.8  # of the layers, overlapping with fsdp's traffic at most
    all_network_cards: bool = True  # whether a ring over hosts uses all network cards of a host
    gathers_per_layer: int = 1  # all-gathers in which one layer's weights come over `fsdp`
    sends_split: bool = True  # a send carries 1 / tensor of the activation, gathered on arrival
    lockstep: bool = False  # stages tick together (this framework); else each runs its own order
    gradient_bytes: int = 4  # of one gradient as it crosses `data`
    scattered_gradient_bytes: int = 0  # the same over `fsdp`; 0: as computed
    gathered_parameter_bytes: int = 0  # of one parameter gathered after a step; 0: none (ZeRO-1)
    host_seconds: float = 0.02  # per step outside the device: data, logging


# Fitted on the training tables of benchmarks/planner/split.toml: (value, standard error).
FITTED: dict[str, tuple[float, float]] = {
    "a100.matmul_share": (0.891, 0.030),
    "h100.matmul_share": (0.743, 0.030),
    "score_factor": (1.22, 0.19),
    "elementwise_factor": (1.53, 0.44),
    "straggler_share": (0.0017, 0.0032),
    "host_wait": (0.00096, 0.0033),
}


def software(name: str, hardware_name: str) -> Software:
    """Returns the fitted constants of a framework on a device."""
    fitted = [value for value, _ in FITTED.values()]
    return software_table(*fitted)[name][fitted_on(hardware_name)]


def fitted_on(hardware_name: str) -> str:
    """Returns the device whose fitted constants apply: "a100", or "h100" for everything later."""
    return "a100" if hardware_name.startswith("a100") else "h100"


def software_table(
    a100_matmul: float,
    h100_matmul: float,
    scores: float,
    elementwise: float,
    stragglers: float,
    host_wait: float,
) -> Mapping[str, Mapping[str, Software]]:
    """Returns framework -> device it was fitted on -> constants, for these values of `FITTED`."""
    megatron_2021 = Software(
        name="megatron-2021",
        matmul_share=a100_matmul,
        elementwise_factor=elementwise,
        score_factor=scores,
        straggler_share=stragglers,
        host_wait=host_wait,
        gradient_bytes=2,
    )
    megatron_core = Software(
        name="megatron-core",
        matmul_share=h100_matmul,
        elementwise_factor=elementwise,
        score_factor=scores,
        straggler_share=stragglers,
        attention_share=0.5,
        overlap=Overlap(
            tensor=saving(0.7), context=saving(0.7), data=saving(0.7), hops=saving(0.7)
        ),
        gradient_bytes=4,
        gathered_parameter_bytes=2,
    )
    compiled = replace(
        megatron_core,
        name="compiled",
        elementwise_factor=0.8 * elementwise,
        overlap=Overlap(tensor=saving(0.3), context=saving(0.3)),
        gathered_parameter_bytes=0,
        host_seconds=0.002,
    )
    ours = replace(
        compiled,
        name="spmdtrain",
        score_bytes=4,
        lockstep=True,
        sends_split=False,
        scattered_gradient_bytes=4,
        overlap=fleet_overlap("h100"),
    )
    on_a100 = fleet_overlap("a100")
    torchtitan = replace(
        compiled, name="torchtitan", attention_share=0.34, scattered_gradient_bytes=4
    )
    frameworks = [
        (ours, {"attention_share": 0.6, "overlap": on_a100}),
        (
            replace(ours, name="spmdtrain-xla", attention_share=0.0),
            {"overlap": on_a100},
        ),
        (megatron_2021, {}),
        (replace(megatron_2021, name="megatron-2022", overlap=Overlap(tensor=saving(0.3))), {}),
        # DeepSpeed's ZeRO-3 gathers each module's weights separately: QKV, projection, two of the
        # MLP and two norms.
        (
            replace(
                megatron_2021,
                name="zero3-2021",
                all_network_cards=False,
                gathers_per_layer=6,
            ),
            {},
        ),
        (megatron_core, {"attention_share": 0.6}),
        (replace(compiled, name="pax-unfused", attention_share=0.0), {}),
        (replace(compiled, name="pax"), {"attention_share": 0.6}),
        (torchtitan, {"attention_share": 0.6}),
        (
            replace(torchtitan, name="torchtitan-eager", elementwise_factor=1.8 * elementwise),
            {"attention_share": 0.6},
        ),
    ]
    return {
        framework.name: {
            "a100": replace(framework, matmul_share=a100_matmul, **there),
            "h100": replace(framework, matmul_share=h100_matmul),
        }
        for framework, there in frameworks
    }
