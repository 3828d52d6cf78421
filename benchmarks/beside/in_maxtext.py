"""Times the step of MaxText, where it is installed, by the lines that it prints.

Its values and batches are its own: losses cannot be compared, sizes are the same. GPT-2 is left
out: MaxText has no learned positions.
"""

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spmdtrain.config.schema import RunConfig

# The module that trains, of newer releases first, and its settings in the same package.
MODULES = ("maxtext.trainers.pre_train.train", "MaxText.train")
LINE = re.compile(r"completed step: (\d+), seconds: ([\d.]+)")


def trainer() -> tuple[str, Path] | None:
    """Returns the module and its file of settings; None where MaxText is not installed."""
    for module in MODULES:
        package = importlib.util.find_spec(module.partition(".")[0])
        if package is not None and package.origin is not None:
            return module, Path(package.origin).parent / "configs" / "base.yml"
    return None


def settings(config: RunConfig) -> dict[str, Any]:
    """Returns MaxText's settings of the same model and step on one GPU."""
    model, train = config.model, config.train
    return {
        "run_name": "beside",
        "hardware": "gpu",
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "attention": "cudnn_flash_jax",
        "remat_policy": "minimal",
        "scan_layers": True,
        "per_device_batch_size": train.global_batch,
        "max_target_length": train.sequence_length,
        "decoder_block": "llama2",
        "base_emb_dim": model.embed,
        "base_num_query_heads": model.heads,
        "base_num_kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "base_mlp_dim": model.ffn,
        "base_num_decoder_layers": model.layers,
        "vocab_size": model.vocab,
        "logits_via_embedding": model.tied,
        "rope_max_timescale": int(model.rope_theta),
    }


def measured(config: RunConfig, chosen: Namespace) -> dict[str, Any]:
    found = trainer()
    assert found is not None, "this is asked where it is installed"
    module, base = found
    skipped = chosen.warmup + 1  # the first compiles
    with tempfile.TemporaryDirectory() as folder:
        asked = settings(config) | {"base_output_directory": folder}
        asked["steps"] = skipped + chosen.steps
        command = [sys.executable, "-m", module, str(base)]
        command += [f"{name}={value}" for name, value in asked.items()]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise SystemExit(f"MaxText ended with code {done.returncode}: {' '.join(last)[:200]}")
    return {
        "seconds": seconds_in(done.stdout + done.stderr, skipped),
        "losses": [],
        "peak_bytes": None,
        "version": f"maxtext {version(module.partition('.')[0].lower())}",
    }


def seconds_in(text: str, skipped: int) -> float:
    """Returns the median seconds of the steps that MaxText's lines tell of, but the first ones."""
    seconds = [float(each) for step, each in LINE.findall(text) if int(step) >= skipped]
    if not seconds:
        raise SystemExit("MaxText printed no time of a step")
    return statistics.median(seconds)
