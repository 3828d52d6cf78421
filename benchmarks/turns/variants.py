"""The variants: whose step, with what settings, kernels and flags of XLA."""

from dataclasses import dataclass, field

GPT2_LOSS = "linear_cross_entropy bfloat16 32x1024x768x50304 weight bfloat16"
LLAMA_LOSS = "linear_cross_entropy bfloat16 2x4096x4096x128256 weight bfloat16"
GPT2_ATTENTION = "attention bfloat16 32x1024x12x64 causal"
OUT = ("train.scan_layers=false",)
NARROW = (*OUT, "precision.logits=bfloat16")
CUBLAS = ("--xla_gpu_enable_triton_gemm=false",)


@dataclass(frozen=True)
class Variant:
    what: str = "step"  # a function of one.py
    shape: str = "gpt2_124m"
    settings: tuple[str, ...] = ()
    kernels: dict[str, str] = field(default_factory=dict)  # by call, in place of the measured ones
    flags: tuple[str, ...] = ()
    root: str = ""  # of another tree of the project
    traced: bool = False


def loss_by(name: str) -> dict[str, str]:
    return {GPT2_LOSS: name}


VARIANTS = {
    "out_fourfold": Variant(settings=OUT, kernels=loss_by("xla/fourfold")),
    "torch": Variant(what="torch_step"),
    "before": Variant(root=".base"),
    "loop": Variant(settings=("train.scan_layers=true",)),
    "out": Variant(settings=OUT),
    "out_kernel": Variant(settings=OUT, kernels=loss_by("triton/fourfold")),
    "narrow_xla": Variant(settings=NARROW, kernels=loss_by("xla/fourfold")),
    "narrow": Variant(settings=NARROW, kernels=loss_by("triton/fourfold")),
    "narrow_eightfold": Variant(settings=NARROW, kernels=loss_by("triton/eightfold")),
    "narrow_cublas": Variant(settings=NARROW, kernels=loss_by("triton/fourfold"), flags=CUBLAS),
    "narrow_cudnn": Variant(
        settings=NARROW, kernels=loss_by("triton/fourfold") | {GPT2_ATTENTION: "cudnn"}
    ),
    "narrow_graphs": Variant(
        settings=NARROW,
        kernels=loss_by("triton/fourfold"),
        flags=("--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL,-CUDNN",),
    ),
    "narrow_traced": Variant(
        settings=NARROW,
        kernels=loss_by("triton/fourfold"),
        flags=("--xla_gpu_enable_command_buffer=",),
        traced=True,
    ),
    "narrow_cublas_traced": Variant(
        settings=NARROW,
        kernels=loss_by("triton/fourfold"),
        flags=("--xla_gpu_enable_command_buffer=", *CUBLAS),
        traced=True,
    ),
    "matmuls": Variant(what="matmuls"),
    "loss": Variant(what="losses"),
    "llama": Variant(shape="llama_4_layers"),
    "llama_float8": Variant(shape="llama_4_layers", settings=("precision.matmul=float8",)),
    "llama_kernel": Variant(
        shape="llama_4_layers",
        settings=("train.scan_layers=false", "precision.logits=bfloat16"),
        kernels={LLAMA_LOSS: "triton/fourfold"},
    ),
    "again": Variant(settings=OUT, kernels=loss_by("xla/fourfold")),
}
