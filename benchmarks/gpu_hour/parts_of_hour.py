"""The parts of the hour, the most telling minutes first."""

import sys

from hour import Part

PYTHON = sys.executable
SPMDTRAIN = (PYTHON, "-m", "spmdtrain.cli")
HERE = "benchmarks/gpu_hour"
# GPT-2 124M without a file of tokens.
GPT2 = ("configs/gpt2_124m.toml", "--set", "data.corpus=synthetic", "--set", "data.path=none")
# As `make test-gpu` has it: the tests see no GPU otherwise.
ON_GPU = ("env", "JAX_PLATFORMS=cuda", "XLA_PYTHON_CLIENT_PREALLOCATE=false")
PYTEST = (*ON_GPU, PYTHON, "-m", "pytest", "-q", "--tb=line", "-m", "gpu")
KERNELS = "tests/kernels/test_on_gpu.py"

PARTS = (
    Part(
        "machine",
        "what is here, and is something wrong with it?",
        (*SPMDTRAIN, "doctor", "--measure"),
        least=0.5,
        most=3,
    ),
    Part(
        "same_bits",
        "do 20 runs of each kernel give the same bits?",
        (*PYTEST, KERNELS, "-k", "twenty_runs"),
        least=0.5,
        most=3,
    ),
    Part(
        "tune_gpt2",
        "which kernels are right and fastest for GPT-2 124M?",
        (*SPMDTRAIN, "tune", *GPT2, "--export", "FOLDER/kernels_gpt2.json"),
        least=1,
        most=5,
    ),
    Part(
        "tune_llama",
        "and for Llama 3 8B, 8 k tokens, packed documents?",
        (*SPMDTRAIN, "tune", "configs/llama3_8b.toml", "--devices", "64", "--set")
        + ("data.corpus=synthetic", "--set", "data.path=none", "--set", "data.packing=documents")
        + ("--export", "FOLDER/kernels_llama.json"),
        least=1,
        most=5,
    ),
    Part(
        "train_gpt2",
        "GPT-2 124M: step time, MFU, memory and stall of a save, against what was predicted?",
        (PYTHON, f"{HERE}/trained.py", "FOLDER/train_gpt2.json"),
        least=2,
        most=6,
    ),
    Part(
        "user",
        "does a new user's first run train, sample and evaluate?",
        (PYTHON, f"{HERE}/first_run.py"),
        least=1,
        most=5,
    ),
    Part(
        "resume",
        "is a run that was killed the same, bit for bit?",
        (PYTHON, f"{HERE}/resume.py"),
        least=1.5,
        most=6,
    ),
    Part(
        "layouts",
        "does each layout of these GPUs train as one does?",
        (PYTHON, f"{HERE}/layouts.py"),
        least=1,
        most=8,
    ),
    Part(
        "torch",
        "how does a step compare with PyTorch's, where that is installed?",
        (PYTHON, "benchmarks/compare_torch.py", "--json", "FOLDER/compare_torch.json"),
        least=4,
        most=15,
    ),
    Part(
        "calibrate",
        "what does this machine reach of its data sheet?",
        (*SPMDTRAIN, "calibrate", "--out", "FOLDER/hardware.toml"),
        least=1,
        most=5,
    ),
    Part(
        "planned",
        "how far off is the predicted step, from the data sheet and then calibrated?",
        (PYTHON, f"{HERE}/planned.py", "FOLDER"),
        least=0.5,
        most=2,
    ),
    Part(
        "kernels",
        "every kernel on every case, against float64",
        (*PYTEST, "-n", "4", KERNELS),
        least=5,
        most=25,
    ),
    Part(
        "bench",
        "every kernel timed",
        (PYTHON, "-m", "pallas_kernels.bench", "--json", "FOLDER/kernels.json"),
        least=3,
        most=20,
    ),
)
