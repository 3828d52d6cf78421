"""Sets the XLA compiler flags for runs on GPUs, jax's share of a GPU's memory, and how much work a
program that runs once is to the compiler.

Each flag comes with its purpose and its measured effect. `set_xla_flags` puts them into the
environment before jax starts, if the run or the compile is for GPUs; the command line calls it. The
user's XLA_FLAGS win. (Passed as `compiler_options` of a compile, the first flag is accepted without
effect: jax 0.12.)

A flag that XLA does not know ends the process. Those below are known to every jaxlib from 0.10 to
0.12 (looked up in the libraries of 0.10.0, 0.10.2, 0.11.0, 0.11.2, 0.12.0 and 0.12.0.1); with any
other jaxlib none is set. There are no NCCL flags here: their effect shows on GPUs only.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from spmdtrain.config.arguments import as_flag
from spmdtrain.config.errors import ConfigError

DEVICES = Path("/dev")
LLVM_LEVEL = "xla_backend_optimization_level"
KNOWN_SINCE = (0, 10)
KNOWN_BEFORE = (0, 13)


@dataclass(frozen=True)
class Flag:
    """A flag of XLA, and why it is set.

    `changed` is its effect on the text compiled by `make fleet`, and `first` the oldest jaxlib for
    which it is set. With `alone` it is set only on a machine with one GPU.
    """

    name: str
    value: bool | int | str
    why: str
    since: str
    changed: str
    first: tuple[int, int] = KNOWN_SINCE
    alone: bool = False

    def __str__(self) -> str:
        text = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"--{self.name}={text}"


FLAGS = (
    Flag(
        "xla_gpu_unsupported_use_all_reduce_one_shot_kernel",
        False,
        why="XLA turns a lone sum of few numbers over 64 devices into a Triton kernel that does "
        "not compile: 'size mismatch when packing elements for LLVM struct expected 2 but got 1'",
        since="needed with jax 0.12 (8 and 128 devices compile without it, as do 256 numbers)",
        changed="a lone sum over 64 H100 compiles instead of ending the process, as it once did in "
        "llama3_8b on fsdp 64",
    ),
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        why="collectives overlap with work; XLA does so by itself on H100, not on A100",
        since="with jax 0.10 to 0.12",
        changed="gpt_1t on 3072 A100: 45 % of the bytes overlap with work, not 22 %, for 0.8 GB",
    ),
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        why="gathers over `fsdp` may overlap with collectives over `tensor`; XLA still "
        "keeps those apart that share more than one device",
        since="from jax 0.11: earlier, XLA calls the outcome undefined (openxla/xla#40520)",
        changed="llama3_70b on fsdp 8 x tensor 8 of H100: 60 %, not 32 %, for no memory",
        first=(0, 11),
    ),
    Flag(
        "xla_gpu_memory_limit_slop_factor",
        100,
        why="the scheduler gives up hiding if it takes more than 76 % of a GPU's memory; "
        "the planner calls 80 % safe",
        since="with jax 0.10 to 0.12",
        changed="llama3_70b on pipeline 8 x data 2 x fsdp 4 x context 2 x tensor 4 of H100: 95 % "
        "of the bytes over `tensor` overlap with work, not 44 %; 63.6 GB, not 63.3. A "
        "program that fills less memory compiles unchanged",
    ),
    Flag(
        "xla_gpu_enable_command_buffer",
        "-CUDNN",
        why="recording cuDNN's attention into a CUDA graph can fail in the first step: "
        "'capturing stream has unjoined work'",
        since="seen with jax 0.11.2 and cuDNN 9.19 on an H200, in a Llama with head dim 128",
        changed="nothing in the text: cuDNN's calls run between the CUDA graphs, not in them",
    ),
    Flag(
        "xla_gpu_enable_triton_gemm",
        False,
        why="cuBLAS adds biases, GELU and residuals in the epilogue of a matmul, where XLA's own "
        "Triton matmuls leave them to kernels of their own; and nothing has to be timed to compile",
        since="seen with jax 0.11.2 on an H200",
        changed="GPT-2 124M takes 63.7 ms a step on an H200, not 64.8, and 12.4 GB, not 13.1. On "
        "tensor 8 the pieces of collective matmuls no longer travel beside matmuls: so not there",
        alone=True,
    ),
)

# The share of a GPU's memory that jax takes when it starts; it never takes more later. Its default
# (0.75) is less than the 80 % that the planner calls safe. jax still reads the old name of the
# variable, but refuses to start with both.
MEMORY_SHARE_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
OLD_MEMORY_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_MEMORY_SHARE = 0.75
MEMORY_SHARE = 0.85
LARGEST_MEMORY_SHARE = 0.92  # leaves room for what CUDA and NCCL hold in addition to the tensors


def wanted() -> tuple[Flag, ...]:
    """Returns the flags that the installed jaxlib knows and that XLA_FLAGS does not name.

    XLA_FLAGS may also name a file of flags; then exactly those are used.
    """
    typed = os.environ.get("XLA_FLAGS", "").strip()
    installed = _jaxlib_version()
    if installed >= KNOWN_BEFORE or typed and not typed.startswith("-"):
        return ()
    named = set(re.findall(r"(?:^|\s)--?(\w+)", typed))
    unnamed = [flag for flag in FLAGS if flag.name not in named and flag.first <= installed]
    return tuple(flag for flag in unnamed if not flag.alone or has_one_gpu())


def set_xla_flags(*, deviceless: bool = False) -> tuple[str, ...]:
    """Adds the wanted flags to XLA_FLAGS if jax will start on GPUs; returns those it added.

    Call it before anything that touches a device: XLA reads its flags once. Without GPUs (no GPU
    plugin of jax, or JAX_PLATFORMS without GPUs) it does nothing, unless `deviceless` says that
    programs will be compiled for absent GPUs. Raises ConfigError if jax has already started and a
    flag is missing.
    """
    deviceless = as_flag(deviceless, "deviceless")
    added = tuple(str(flag) for flag in wanted() if not (deviceless and flag.alone))
    if not added or not (deviceless or runs_on_gpus()):
        return ()
    if jax_has_started():
        raise ConfigError(
            "jax has already started: it would not read another flag",
            asked=" ".join(added),
            fix="calling set_xla_flags before anything that touches a device",
        )
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *added])
    return added


def check_xla_flags() -> None:
    """Raises ConfigError if XLA would end the process over the contents of XLA_FLAGS.

    XLA parses it in C++ and aborts. So a separate process, which imports only XLA, tries it first:
    a tenth of a second, and only if the variable is set and jax has not started with it.
    """
    typed = os.environ.get("XLA_FLAGS", "").strip()
    if not typed or jax_has_started():
        return
    program = "import jaxlib.xla_client as xla; xla.make_cpu_client()"
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
    output = done.stderr.decode(errors="replace")
    if done.returncode == 0 or "parse_flags_from_env" not in output:
        return  # jax reports anything else that is wrong
    wrong = re.findall(r"(?:parse_flags_from_env|command_line_flags)\S*\] (.*)", output)
    raise ConfigError(
        f"XLA does not take XLA_FLAGS: {wrong[0] if wrong else ''}"[:300],
        found=f"XLA_FLAGS={typed!r:.200}",
        fix="unset XLA_FLAGS",
    )


def jax_has_started() -> bool:
    """Returns True if jax has found its devices in this process; neither imports nor starts it."""
    # There is no public API to ask without starting the backends (jax 0.10 to 0.12).
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def set_memory_share() -> None:
    """Lets jax take `MEMORY_SHARE` of each GPU's memory, unless the user set a share.

    Call it before anything that touches a device.
    """
    memory_share()
    if runs_on_gpus():
        os.environ.setdefault(memory_share_variable(), str(MEMORY_SHARE))


def memory_share() -> float:
    """Returns the share of each GPU's memory that jax takes. Raises ConfigError if not a number."""
    name = memory_share_variable()
    text = os.environ.get(name) or str(JAX_MEMORY_SHARE)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf:
        raise ConfigError(
            f"{name} is not a share of a GPU's memory",
            found=f"{name}={text!r:.80}",
            fix=f"{name}=0.8",
        )
    return share


def memory_share_variable() -> str:
    """Returns the variable's name: the one that is set, else jax's current name."""
    if os.environ.get(OLD_MEMORY_SHARE_VARIABLE):
        return OLD_MEMORY_SHARE_VARIABLE
    return MEMORY_SHARE_VARIABLE


def has_one_gpu() -> bool:
    """Returns True if this machine has one NVIDIA GPU; starts nothing."""
    return len(list(DEVICES.glob("nvidia[0-9]*"))) == 1


def runs_on_gpus() -> bool:
    """Returns True if jax, once it starts, will look for GPUs; neither imports nor starts it."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    if platforms and not re.search("cuda|gpu|rocm", platforms):
        return False
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None:
        return False
    names = [module.name for module in pkgutil.iter_modules(plugins.submodule_search_locations)]
    return any(re.search("cuda|rocm", name) for name in names)


def as_comment() -> str:
    """Returns the flags for `--print-config`, as TOML comments."""
    lines = ["# XLA_FLAGS of a run on GPUs, unless you set them:"]
    for flag in FLAGS:
        yours = "" if flag in wanted() else "   (left to you)"
        lines += [f"#   {flag}{yours}", f"#     {flag.why}"]
    variable = memory_share_variable()
    yours = "   (left to you)" if variable in os.environ else ""
    lines += [
        f"# {variable}={MEMORY_SHARE}{yours}",
        f"#     the share of a GPU's memory that jax takes; by itself it takes {JAX_MEMORY_SHARE}",
    ]
    return "\n".join(lines)


def _jaxlib_version() -> tuple[int, int]:
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    return int(major), int(minor)


def options_of_one_run(platform: str) -> dict[str, int] | None:
    """Returns the compiler options of a program that this process runs once, on this platform.

    On CPUs LLVM takes a third of the time at level 1, and the numbers equal those of the highest
    level bit for bit (jax 0.10 and 0.12; at level 0 they do not). None leaves the level to XLA, or
    to the user who set one in XLA_FLAGS.
    """
    is_set = f"--{LLVM_LEVEL}" in os.environ.get("XLA_FLAGS", "")
    return None if platform != "cpu" or is_set else {LLVM_LEVEL: 1}
