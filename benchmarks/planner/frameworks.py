"""How well other frameworks use a device, as published runs show: constants beside our own.

`software_table` has them all for values of the fitted constants, which fit.py fits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from spmdtrain.planner.cost.overlap import Overlap, saving
from spmdtrain.planner.cost.software import (
    FITTED,
    LAUNCH_SECONDS,
    Software,
    fitted_on,
    our_software,
)

SoftwareTable = Mapping[str, Mapping[str, Software]]  # framework -> device it was fitted on


def framework(name: str, hardware_name: str) -> Software:
    """The fitted constants of a framework on a device."""
    fitted = [value for value, _ in FITTED.values()]
    return software_table(*fitted)[name][fitted_on(hardware_name)]


def software_table(
    a100_matmul: float,
    h100_matmul: float,
    scores: float,
    elementwise: float,
    stragglers: float,
    host_wait: float,
) -> SoftwareTable:
    """Constants of this framework and of the others, for these values of `FITTED`."""
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
    torchtitan = replace(
        compiled, name="torchtitan", attention_share=0.34, scattered_gradient_bytes=4
    )
    frameworks = [
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
        # Aleph Alpha's, with ZeRO-1: it hides nothing, and its attention is FlashAttention 2.
        (
            replace(
                megatron_2021,
                name="scaling-2023",
                attention_share=0.6,
                gathered_parameter_bytes=2,
            ),
            {},
        ),
        (megatron_core, {"attention_share": 0.6}),
        *((software, {}) for software in _with_experts(megatron_core, elementwise)),
        (replace(compiled, name="pax-unfused", attention_share=0.0), {}),
        (replace(compiled, name="pax"), {"attention_share": 0.6}),
        (torchtitan, {"attention_share": 0.6}),
        (
            replace(torchtitan, name="torchtitan-eager", elementwise_factor=1.8 * elementwise),
            {"attention_share": 0.6},
        ),
    ]
    ours = our_software(a100_matmul, h100_matmul, scores, elementwise, stragglers, host_wait)
    return ours | {
        framework.name: {
            "a100": replace(framework, matmul_share=a100_matmul, **there),
            "h100": replace(framework, matmul_share=h100_matmul),
        }
        for framework, there in frameworks
    }


def _with_experts(megatron_core: Software, elementwise: float) -> Iterator[Software]:
    """Returns Megatron as it trains models with experts, with even loads, in several versions.

    Nothing here is fitted. Of an expert, 6 kernels are its matmuls, and in 8 bits 4 more make
    arrays narrow and 12 put the scales of operands in order. That a layer has 500 others is judged
    by Qwen3-30B-A3B in microbatches of 1 on B200, in which devices wait for their hosts.
    """
    one = replace(
        megatron_core,
        name="megatron-moe",
        expert_imbalance=1.0,
        copies_per="hosts",
        layer_kernels=500,
        expert_kernels=6,
        narrow_kernels=16,
    )
    hidden = replace(one.overlap, expert=saving(0.7))
    # NCCL wants to know on the host how many rows go where: the thread that launches waits for the
    # device, and then the device for the thread.
    by_rows = replace(one, name="megatron-moe-rows", copies_per="rows", launches_ahead=False)
    yield one
    yield by_rows
    # Beside the other direction's work, each launch also orders two streams.
    yield replace(
        by_rows, name="megatron-moe-beside", overlap=hidden, launch_wait=2 * LAUNCH_SECONDS
    )
    # A bias, two clamps, the sigmoid and three products, each reads and writes; the backward twice.
    yield replace(one, name="megatron-moe-clamps", activation_columns=(24, 48))
    yield replace(
        one,
        name="megatron-moe-graphs",
        elementwise_factor=0.8 * elementwise,  # as `compiled`
        overlap=hidden,
        layer_kernels=0,
        expert_kernels=0,
        narrow_kernels=0,
    )
