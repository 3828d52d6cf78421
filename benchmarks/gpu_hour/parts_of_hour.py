"""The parts of the hour, the most telling minutes first: right kernels, their times, tokens a
second beside PyTorch; then all else.
"""

import sys

from hour import Part

PYTHON = sys.executable
SPMDTRAIN = (PYTHON, "-m", "spmdtrain.cli")
HERE = "benchmarks/gpu_hour"
BESIDE = (PYTHON, "benchmarks/beside")
BENCH = (PYTHON, "-m", "pallas_kernels.bench")


def settings(*pairs: str) -> tuple[str, ...]:
    return tuple(word for pair in pairs for word in ("--set", pair))


# Without a file of tokens.
SYNTHETIC = settings("data.corpus=synthetic", "data.path=none")
# The shape that `trained.py` and `beside` run.
GPT2 = (
    *("configs/gpt2_124m.toml", *SYNTHETIC),
    *settings("train.global_batch=32", "train.microbatch=none", "mesh.data=1"),
)
LLAMA = (
    *("configs/llama3_8b.toml", "--devices", "64", *SYNTHETIC),
    *settings("data.packing=documents"),
)
# The environment of `make test-gpu`, without which the tests see no GPU. -v names each test as it
# ends.
ON_GPU = ("env", "JAX_PLATFORMS=cuda", "XLA_PYTHON_CLIENT_PREALLOCATE=false")
# The flags of docs/deterministic.md: without them neither cuDNN nor XLA gives the same bits twice.
SAME_BITS = "XLA_FLAGS=--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"
PYTEST = (PYTHON, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider")
KERNELS = "tests/kernels/test_on_gpu.py"
ONE_NORM = ("tests/kernels/test_norms.py", "-k", "1x64")
# For the rehearsal on a CPU.
TINY = settings("model.layers=1", "model.embed=32", "model.heads=2", "model.vocab=64")
TINY_STEPS = settings("train.sequence_length=16", "train.global_batch=2", "train.microbatch=none")
TINY_RUN = (*settings("data.corpus=synthetic", "model.embed=32", "model.ffn=64"), *TINY_STEPS)

PARTS = (
    Part(
        "turns",
        "a step of GPT-2 124M and of four layers of Llama 8B in variants, beside compiled PyTorch: "
        "milliseconds, memory, kernels by time; its matmuls, its loss and recurrences alone",
        (PYTHON, "benchmarks/turns", "FOLDER/turns", "--seconds", "SECONDS"),
        least=6,
        most=8,
        rehearsal=(
            PYTHON,
            "benchmarks/turns",
            "FOLDER/turns",
            "--dry",
            "--seconds",
            "SECONDS",
            "--only",
        )
        + ("default", "narrow", "loop", "in_place", "norm_apart", "matmuls", "loss", "biases")
        + ("recurrence", "llama_float8", "again"),
    ),
    Part(
        "right",
        "is every kernel right, against float64, on the cases that cover each once?",
        (*ON_GPU, *PYTEST, "-n", "auto", "-m", "gpu and core", KERNELS),
        least=2.5,
        most=4,
        rehearsal=(*PYTEST, *ONE_NORM),
    ),
    Part(
        "tune_gpt2",
        "which kernels are right and fastest for GPT-2 124M?",
        (*SPMDTRAIN, "tune", *GPT2, "--again", "--export", "FOLDER/kernels_gpt2.json"),
        least=1.5,
        most=5,
        rehearsal=(*SPMDTRAIN, "tune", *GPT2, *TINY, *TINY_STEPS)
        + ("--export", "FOLDER/kernels_gpt2.json"),
    ),
    Part(
        "times",
        "attention and norms timed, of head dims 64 to 256 and widths 1024 to 8192",
        (*BENCH, "--brief", "--ops", "attention", "norm", "--json", "FOLDER/times.json"),
        least=1.5,
        most=5,
        rehearsal=(*BENCH, "--dry", "--first", "1", "--ops", "norm")
        + ("--json", "FOLDER/times.json"),
    ),
    Part(
        "beside_gpt2",
        "tokens a second of GPT-2 124M beside a bare jit and PyTorch",
        (*BESIDE, "--shapes", "gpt2_124m", "--rounds", "2", "--json", "FOLDER/beside_gpt2.json"),
        least=3,
        most=7,
        rehearsal=(*BESIDE, "--dry", "--shapes", "gpt2_124m", "--json", "FOLDER/beside_gpt2.json"),
    ),
    Part(
        "train_gpt2",
        "GPT-2 124M: step time, MFU, memory and stall of a save, against what was predicted?",
        (PYTHON, f"{HERE}/trained.py", "FOLDER/train_gpt2.json"),
        least=1.5,
        most=6,
        rehearsal=(PYTHON, f"{HERE}/trained.py", "FOLDER/train_gpt2.json", *TINY, *TINY_STEPS),
    ),
    Part(
        "profile_gpt2",
        "where does that step spend its time, by sort of work and by part?",
        (PYTHON, f"{HERE}/profiled.py", "FOLDER/profile_gpt2.json"),
        least=1,
        most=3,
        rehearsal=(PYTHON, f"{HERE}/profiled.py", "FOLDER/profile_gpt2.json", *TINY, *TINY_STEPS),
    ),
    Part(
        "machine",
        "what is here, and is something wrong with it?",
        (*SPMDTRAIN, "doctor", "--measure"),
        least=0.5,
        most=3,
        rehearsal=(*SPMDTRAIN, "doctor"),
    ),
    Part(
        "same_bits",
        "do 20 runs of each kernel give the same bits?",
        (*ON_GPU, SAME_BITS, *PYTEST, "-m", "gpu", KERNELS, "-k", "twenty_runs"),
        least=0.5,
        most=3,
        rehearsal=(*PYTEST, *ONE_NORM),
    ),
    Part(
        "resume",
        "is a run that was killed the same, bit for bit?",
        ("env", SAME_BITS, PYTHON, f"{HERE}/resume.py"),
        least=1.5,
        most=6,
        rehearsal=(PYTHON, f"{HERE}/resume.py", "--kill-at", "15", *TINY_RUN)
        + settings("train.steps=30"),
    ),
    Part(
        "craft",
        "what do 8-bit matmuls, offloading and recomputing cost and save in a Llama?",
        (PYTHON, f"{HERE}/craft.py", "FOLDER/craft.json"),
        least=3,
        most=8,
        rehearsal=(PYTHON, f"{HERE}/craft.py", "FOLDER/craft.json", "--only", "bfloat16", "float8")
        + settings("model.embed=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64")
        + settings("model.vocab=64", "train.sequence_length=16"),
    ),
    Part(
        "beside_llama",
        "Llama 1B at 8 k tokens, and 8B where it fits, beside a bare jit, PyTorch and MaxText",
        (*BESIDE, "--shapes", "llama_1b", "llama_8b", "--json", "FOLDER/beside_llama.json"),
        least=5,
        most=18,
        rehearsal=(*BESIDE, "--dry", "--shapes", "llama_8b", "--json", "FOLDER/beside_llama.json"),
    ),
    Part(
        "tune_llama",
        "which kernels for Llama 3 8B, 8 k tokens, packed documents?",
        (*SPMDTRAIN, "tune", *LLAMA, "--again", "--export", "FOLDER/kernels_llama.json"),
        least=1,
        most=5,
        rehearsal=(*SPMDTRAIN, "tune", *GPT2, *TINY, *TINY_STEPS)
        + ("--set", "data.packing=documents", "--export", "FOLDER/kernels_llama.json"),
    ),
    Part(
        "calibrate",
        "what does this machine reach of its data sheet?",
        (*SPMDTRAIN, "calibrate", "--out", "FOLDER/hardware.toml"),
        least=1,
        most=5,
        rehearsal=(*SPMDTRAIN, "calibrate", "--out", "FOLDER/hardware.toml"),
    ),
    Part(
        "planned",
        "how far off is the predicted step, from the data sheet and then calibrated?",
        (PYTHON, f"{HERE}/planned.py", "FOLDER"),
        least=0.5,
        most=2,
        rehearsal=(PYTHON, f"{HERE}/planned.py", "FOLDER", "--gpu", "h100"),
    ),
    Part(
        "overlap",
        "how much communication is hidden, in a profile and by the compiled text?",
        (PYTHON, f"{HERE}/overlap.py", "FOLDER/overlap.json"),
        least=1,
        most=4,
        rehearsal=(PYTHON, f"{HERE}/overlap.py", "FOLDER/overlap.json", "--simulate-devices", "2")
        + (*TINY, *TINY_STEPS),
    ),
    Part(
        "user",
        "does a new user's first run train, sample and evaluate?",
        (PYTHON, f"{HERE}/first_run.py"),
        least=1,
        most=5,
        rehearsal=(PYTHON, f"{HERE}/first_run.py", *settings("train.steps=10")),
    ),
    Part(
        "layouts",
        "does each layout of these GPUs train as one does?",
        (PYTHON, f"{HERE}/layouts.py"),
        least=1,
        most=8,
        rehearsal=(PYTHON, f"{HERE}/layouts.py", *TINY_RUN),
    ),
    Part(
        "kernels",
        "every kernel on every case, against float64",
        (*ON_GPU, *PYTEST, "-n", "auto", "-m", "gpu", KERNELS),
        least=5,
        most=25,
        rehearsal=(*PYTEST, *ONE_NORM),
    ),
    Part(
        "bench",
        "every kernel timed",
        (*BENCH, "--json", "FOLDER/kernels.json"),
        least=3,
        most=20,
        rehearsal=(*BENCH, "--dry", "--first", "1", "--ops", "grouped", "loss")
        + ("--json", "FOLDER/kernels.json"),
    ),
)
