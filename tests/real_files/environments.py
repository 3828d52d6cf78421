"""The virtual environments of the tools, made by the command itself, at pinned versions."""

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ENVIRONMENTS = {
    "transformers 4.28": (
        *("transformers==4.28.1", "tokenizers==0.13.3", "torch==2.13.0", "numpy==1.26.4"),
        *("safetensors==0.4.5", "huggingface-hub==0.25.2"),
    ),
    "transformers 4.57": (
        *("transformers==4.57.6", "torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0"),
    ),
    "transformers 5.24": (
        *("transformers==5.24.0", "torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0"),
        *("tokenizers==0.23.3", "peft==0.21.2", "lm-eval==0.4.13"),
    ),
    "data": ("datasets==5.2.0", "trl==1.16.0", "torch==2.13.0", "transformers==5.24.0"),
    "tokenizers": (
        *("tokenizers==0.23.3", "sentencepiece==0.2.3", "tiktoken==0.14.0"),
        "mistral-common==1.13.1",
    ),
    "megatron": ("megatron-core==0.16.1", "torch==2.13.0", "numpy==2.4.6"),
}


@cache
def python_of(name: str, root: Path) -> Path:
    """Returns the Python of an environment, which is made if it is not there."""
    pins = ENVIRONMENTS[name]
    digest = hashlib.sha256("\n".join(pins).encode()).hexdigest()[:8]
    folder = root / f"{name.replace(' ', '-')}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {', '.join(pins)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        quiet = ("--quiet", "--disable-pip-version-check")
        subprocess.run([python, "-m", "pip", "install", *quiet, *pins], check=True)
        (folder / "installed").touch()
    return python


def run_in(name: str, root: Path, script: Path, *arguments: str | Path) -> None:
    """Runs a script in an environment, without our code and without a network."""
    without = {"PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS"}
    env = {key: value for key, value in os.environ.items() if key not in without}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    command = [python_of(name, root), script, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, {script.name} {arguments}: {done.stderr[-1500:]}")
