"""What options for large models cost and save on one GPU: 8-bit matmuls, offloading, recomputing.

    python benchmarks/gpu_hour/craft.py FILE.json [--only NAME ...] [--config FILE]
                                        [--set KEY=VALUE]

Trains four layers of Llama 3 8B, with its vocabulary, once for each option. FILE.json is written
after each of them.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from trained import figures
from training import arguments, train

CONFIG = "configs/llama3_8b.toml"
SETTINGS = [
    "model.layers=4",
    "train.sequence_length=4096",
    "train.global_batch=2",
    "train.microbatch=none",
    "train.steps=14",
    "train.remat=dots",
    "data.corpus=synthetic",
    "data.path=none",
    "data.validation_fraction=0",
    "eval.every=0",
    "checkpoint.every=0",
    "optimizer.warmup=0",
    "optimizer.schedule=constant",
    "mesh.fsdp=1",
    "log.every=1",
]
BASE = "bfloat16"
OPTIONS = {
    BASE: [],
    "float8": ["precision.matmul=float8"],
    "recomputed": ["train.remat=full"],
    "offloaded": ["train.remat=offload"],
    "moments on the host": ["optimizer.memory=host"],
}


def line(name: str, found: dict[str, Any], base: dict[str, Any] | None) -> str:
    memory = found["summary"]["memory_bytes"]["measured"]
    parts = [f"{name}: {1e3 * found['step_seconds']:.1f} ms"]
    parts += [f"{memory / 1e9:.1f} GB"] if memory else []
    if base is not None and base is not found:
        parts.append(f"{base['step_seconds'] / found['step_seconds']:.2f} x as fast as {BASE}")
    return ", ".join(parts)


def main() -> None:
    parser = arguments(__doc__, CONFIG)
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.only:
            run = Path(folder) / name.replace(" ", "_")
            try:
                train(chosen.config, run, [*SETTINGS, *OPTIONS[name], *chosen.set])
            except SystemExit as error:
                print(f"{name}: {error}", flush=True)
                failed.append(name)
                continue
            found[name] = figures(run)
            print(line(name, found[name], found.get(BASE)), flush=True)
            chosen.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("; ".join(line(name, each, found.get(BASE)) for name, each in found.items()))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
