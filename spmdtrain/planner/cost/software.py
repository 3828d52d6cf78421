"""Defines the share of a device's data-sheet figures that training software reaches.

There are few constants. Most are fixed: they come from a kernel's own benchmark, or from counting.
Six are fitted (`FITTED`), by benchmarks/planner/fit.py, to the tables that
benchmarks/planner/split.toml names as training tables. Nothing else is fitted.

`Hardware` (hardware.py) is what a device can do; `Software` is how well one framework uses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spmdtrain.planner.cost.overlap import Overlap, fleet_overlap

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

# The smaller of two shares in compiled steps of GPT-2 124M on 8 H200s: 0.60 with the loss by XLA,
# 0.83 by its kernel (`python benchmarks/absent_gpus.py step`). The fleet's steps are loops.
WRITTEN_OUT_OVERLAP = 0.6


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
    # The next two are judged, and not fitted. Ours is a Triton kernel, whose public relatives reach
    # 40 to 57 % of peak where a dense matmul has 65 %.
    grouped_share: float = 0.8  # of a dense matmul, for one by the experts of rows
    expert_imbalance: float = 1.2  # rows of the fullest device over the mean
    keeps_dispatched: bool = True  # what arrived is kept, and not sent and computed again
    # How many copies of a token travel: "rows", one for each of its experts; "devices", one for
    # each device that has some of them; "hosts", one for each host, which passes it on.
    copies_per: str = "devices"
    narrow_experts: bool = True  # experts' matmuls are in 8 bits where others are
    narrow_head: bool = False  # and so are the head's
    narrow_attention: bool = False  # and so are attention's
    # The parts that a backward computes again beyond `Workload.remat`, by Megatron's names: "norms"
    # (layernorm), "latents" (mla_up_proj) and "activations" of experts (moe_act).
    again: tuple[str, ...] = ()
    # Kernels of a layer with experts, forward and backward, then more for each expert that a device
    # has, and more of these in 8 bits. 0: a compiled step, of which a host launches none by itself.
    layer_kernels: int = 0
    expert_kernels: int = 0
    narrow_kernels: int = 0
    launches_ahead: bool = True  # False: a device waits for all launches, and not for late ones
    launch_wait: float = LAUNCH_SECONDS  # s in which a host launches one of them
    # Columns as wide as an expert that its activation moves, forward and backward; None: in one
    # kernel, like the mlp's.
    activation_columns: tuple[int, int] | None = None
    # Passes over what layers keep in which a loop copies it into arrays of all layers and out of
    # them again; 0: other constants count them.
    stack_passes: float = 0.0
    # The share of gradients over `data` that moves beside work if layers are written out; at least
    # `overlap.data`, which is that of loops.
    written_out_overlap: float = 0.0
    loss_was_timed: bool = False  # by itself: step_time.TIMED_LOGIT_BYTES holds


# Fitted on the training tables of benchmarks/planner/split.toml: (value, standard error).
FITTED: dict[str, tuple[float, float]] = {
    "a100.matmul_share": (0.891, 0.030),
    "h100.matmul_share": (0.743, 0.030),
    "score_factor": (1.22, 0.19),
    "elementwise_factor": (1.53, 0.44),
    "straggler_share": (0.0017, 0.0032),
    "host_wait": (0.00096, 0.0033),
}


# Constants of this framework that were measured on a device, in place of fitted ones.
# h200: benchmarks/results/h200-2026-11-28. Matmuls and the loss by themselves; attention in
# h200-2026-11-26; the last two from whole steps, with the layers as a loop and written out.
MEASURED: Mapping[str, Mapping[str, Any]] = {
    "h200": {
        "matmul_share": 0.885,
        "attention_share": 0.43,
        "loss_was_timed": True,
        "elementwise_factor": 0.8,
        "stack_passes": 4.6,
    }
}


def software(name: str, hardware_name: str) -> Software:
    """Returns the fitted constants of "spmdtrain" or "spmdtrain-xla" on a device."""
    fitted = [value for value, _ in FITTED.values()]
    ours = our_software(*fitted)[name][fitted_on(hardware_name)]
    return replace(ours, **MEASURED.get(hardware_name, {}))


def fitted_on(hardware_name: str) -> str:
    """Returns the device whose fitted constants apply: "a100", or "h100" for everything later."""
    return "a100" if hardware_name.startswith("a100") else "h100"


def our_software(
    a100_matmul: float,
    h100_matmul: float,
    scores: float,
    elementwise: float,
    stragglers: float,
    host_wait: float,  # noqa: ARG001 - of stages that run their own order
) -> Mapping[str, Mapping[str, Software]]:
    """Returns the constants of this framework for these values of `FITTED`.

    They are by name, "spmdtrain" or without fused attention "spmdtrain-xla", and by the device that
    they were fitted on.
    """
    on_h100 = Software(
        name="spmdtrain",
        matmul_share=h100_matmul,
        elementwise_factor=0.8 * elementwise,
        score_factor=scores,
        straggler_share=stragglers,
        attention_share=0.5,
        score_bytes=4,
        overlap=fleet_overlap("h100"),
        written_out_overlap=WRITTEN_OUT_OVERLAP,
        sends_split=False,
        lockstep=True,
        gradient_bytes=4,
        scattered_gradient_bytes=4,
        host_seconds=0.002,
        grouped_share=0.6,
        keeps_dispatched=False,
        narrow_experts=False,
    )
    on_a100 = replace(
        on_h100, matmul_share=a100_matmul, attention_share=0.6, overlap=fleet_overlap("a100")
    )
    fused = {"a100": on_a100, "h100": on_h100}
    unfused = {
        device: replace(constants, name="spmdtrain-xla", attention_share=0.0)
        for device, constants in fused.items()
    }
    return {"spmdtrain": fused, "spmdtrain-xla": unfused}
