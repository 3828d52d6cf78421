"""How well a software stack uses a device: the few constants of the model, and where each comes from.

Fixed are those that a kernel's own benchmark, or counting, gives. Fitted are the six of `FITTED`, by
benchmarks/planner/fit.py on the tables that benchmarks/planner/split.toml names as training tables; nothing else is.
"""

from dataclasses import dataclass, replace

LINK = 0.8  # share of a link's data-sheet bandwidth that rings reach (NCCL on NVLink and InfiniBand)
HOP = 0.2  # the same of one send and receive inside a host: 47 GB/s on A100, T_comm of zb_table9
MEMORY = 0.85  # share of memory bandwidth that copies reach
WAVE = 0.6  # how much of the last, partly filled wave of a matmul's tiles is waited for
TILES = ((256, 128, 1.0), (128, 128, 0.94), (64, 128, 0.8), (64, 64, 0.6), (32, 32, 0.25))  # rows, columns, rate
RAMP = 36  # of the inner dim: what filling a tile's pipeline costs
LAUNCH = 5e-6  # seconds, of a kernel
# Of a second of work that a collective runs beside: what it loses. Work beside a collective takes 18.9 % longer on
# average over models, sizes and devices, 40 % at most (arXiv 2507.03114).
BESIDE = 1 - 1 / 1.189


@dataclass(frozen=True)
class Stack:
    """A way of writing the same model.

    `matmul`: share of `Hardware.matmul x peak` that its matmuls reach. `passes`, `scores`: how many times the counted
    bytes its elementwise passes and its attention scores move. `flash`: share of peak of fused attention, 0 if scores
    are written out (`score_bytes` each). `gap`: how much of a step is lost per doubling of devices, which wait for
    the slowest of them. `exchange`: seconds that a stage's device waits for its host around each forward and each
    backward of a microbatch.
    Overlaps are the hidden share of a collective that can be hidden; of `fsdp` the share of the layers' work that its
    collectives can run beside. `rings`: whether a ring over many hosts uses all network cards of a host. `lockstep`:
    whether a pipeline ticks by table (ours) or by each stage's own order.
    """

    name: str
    matmul: float = 0.93
    passes: float = 1.3
    scores: float = 1.4
    gap: float = 0.008
    exchange: float = 0.0
    flash: float = 0.0
    score_bytes: int = 2
    tensor_overlap: float = 0.0
    data_overlap: float = 0.0
    fsdp_overlap: float = 0.8
    hop_overlap: float = 0.0
    rings: bool = True
    pieces: int = 1  # in which a layer's weights are gathered over `fsdp`
    scatter_hops: bool = True  # a hop carries 1 / tensor of the activation
    lockstep: bool = False
    gradient_bytes: int = 4  # as they cross `data`
    scattered_bytes: int = 0  # of a gradient that is scattered over `fsdp`; 0: as computed
    gathered_bytes: int = 0  # of a parameter gathered after a step (distributed optimizer)
    step: float = 0.02  # seconds per step outside the device: data, logging


# Fitted on the training tables of benchmarks/planner/split.toml: value, standard error.
FITTED: dict[str, tuple[float, float]] = {
    "a100.matmul": (0.891, 0.030),
    "h100.matmul": (0.743, 0.030),
    "scores": (1.22, 0.19),
    "passes": (1.53, 0.44),
    "gap": (0.0017, 0.0032),
    "exchange": (0.00096, 0.0033),
}


def _fitted(key: str) -> float:
    return FITTED[key][0]


def stacks(
    a100: float, h100: float, scores: float, passes: float, gap: float, exchange: float
) -> dict[str, dict[str, Stack]]:
    """Name -> generation ("a100", or "h100" for all later ones) -> stack, at these constants."""
    old = Stack("megatron-2021", a100, passes, scores, gap, exchange, gradient_bytes=2)
    core = Stack(
        *("megatron-core", h100, passes, scores, gap),
        flash=0.5,
        tensor_overlap=0.7,
        data_overlap=0.7,
        hop_overlap=0.7,
        gradient_bytes=4,
        gathered_bytes=2,
    )
    compiled = replace(
        core,
        name="compiled",
        passes=0.8 * passes,
        tensor_overlap=0.3,
        hop_overlap=0.0,
        gathered_bytes=0,
        data_overlap=0.0,
        step=0.002,
    )
    ours = replace(compiled, name="spmdtrain", score_bytes=4, lockstep=True, scatter_hops=False)
    titan = replace(compiled, name="torchtitan", flash=0.34, scattered_bytes=4)
    by_generation = lambda stack, **a100_has: {  # noqa: E731
        "a100": replace(stack, matmul=a100, **a100_has),
        "h100": replace(stack, matmul=h100),
    }
    return {
        "spmdtrain": by_generation(ours, flash=0.6),
        "spmdtrain-xla": by_generation(replace(ours, name="spmdtrain-xla", flash=0.0), flash=0.0),
        "megatron-2021": by_generation(old),
        "megatron-2022": by_generation(replace(old, name="megatron-2022", tensor_overlap=0.3)),
        # each module's weights on their own: qkv, projection, two of the mlp, two norms
        "zero3-2021": by_generation(replace(old, name="zero3-2021", rings=False, pieces=6)),
        "megatron-core": by_generation(core, flash=0.6),
        "pax-unfused": by_generation(replace(compiled, name="pax-unfused", flash=0.0)),
        "pax": by_generation(replace(compiled, name="pax"), flash=0.6),
        "torchtitan": by_generation(titan, flash=0.6),
        "torchtitan-eager": by_generation(replace(titan, name="torchtitan-eager", passes=1.8 * passes), flash=0.6),
    }


def stack(name: str, device: str) -> Stack:
    """The named stack on a device of that name."""
    found = stacks(*map(_fitted, FITTED))[name]
    return found["a100" if device.startswith("a100") else "h100"]
