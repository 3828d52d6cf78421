"""The variants: whose step, with what settings, kernels and flags of XLA.

`default` is what a user gets: it is also timed last, which shows how far the card has drifted.
"""

from dataclasses import dataclass, field

LOSSES = (
    "linear_cross_entropy bfloat16 32x1024x768x50304 weight bfloat16",
    "linear_cross_entropy bfloat16 2x4096x4096x128256 weight bfloat16",
)
GPT2_ATTENTION = "attention bfloat16 32x1024x12x64 causal"
GPT2_NORM = "layernorm bfloat16 32768x768 scale float32 bias float32"
NARROW = ("precision.logits=bfloat16",)
FLOAT8 = ("precision.matmul=float8",)
# With CUDA graphs a trace does not tell which instruction a kernel belongs to.
UNGRAPHED = ("--xla_gpu_enable_command_buffer=",)
TORCH = "torch_step"
LLAMA = "llama_4_layers"


@dataclass(frozen=True)
class Variant:
    what: str = "step"  # a function of one.py
    shape: str = "gpt2_124m"  # of beside/shapes.py
    settings: tuple[str, ...] = ()
    kernels: dict[str, str] = field(default_factory=dict)  # by call, in place of the measured ones
    flags: tuple[str, ...] = ()
    root: str = ""  # another tree of the project, beside the files of this one
    traced: bool = False


def loss_by(name: str) -> dict[str, str]:
    """Returns this implementation for the loss of both models, with logits of either dtype."""
    return {f"{call}{logits}": name for call in LOSSES for logits in ("", " logits bfloat16")}


VARIANTS = {
    "default": Variant(),
    "torch": Variant(what=TORCH),
    "narrow": Variant(settings=NARROW),
    "loop": Variant(settings=("train.scan_layers=true",)),
    "in_place": Variant(kernels={f"{GPT2_ATTENTION} joined": "in place"}),
    "norm_apart": Variant(kernels={f"{GPT2_NORM} with x": "apart"}),
    "norm_many": Variant(kernels={GPT2_NORM: "triton/many"}),
    "loss_by_xla": Variant(kernels=loss_by("xla/fourfold")),
    "cudnn": Variant(kernels={GPT2_ATTENTION: "cudnn"}),
    "triton_gemm": Variant(flags=("--xla_gpu_enable_triton_gemm=true",)),
    "traced": Variant(settings=NARROW, flags=UNGRAPHED, traced=True),
    "matmuls": Variant(what="matmuls"),
    "loss": Variant(what="losses"),
    "biases": Variant(what="biases"),
    "recurrence": Variant(what="recurrences"),
    "llama": Variant(shape=LLAMA),
    "torch_llama": Variant(what=TORCH, shape=LLAMA),
    "llama_narrow": Variant(shape=LLAMA, settings=NARROW),
    "llama_eightfold": Variant(shape=LLAMA, settings=NARROW, kernels=loss_by("triton/eightfold")),
    "llama_float8": Variant(shape=LLAMA, settings=(*NARROW, *FLOAT8)),
    "llama_traced": Variant(shape=LLAMA, settings=(*NARROW, *FLOAT8), flags=UNGRAPHED, traced=True),
    "again": Variant(),
}
