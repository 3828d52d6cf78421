"""Trains GPT-2 124M for a few steps and says what a step took against what was predicted.

python benchmarks/gpu_hour/trained.py FILE.json [--config FILE] [--set KEY=VALUE]
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from training import arguments, metrics, train

CONFIG = "configs/gpt2_124m.toml"
SAVED = 20  # steps between saves
WARM = 5  # steps that do not count
SETTINGS = [
    "train.steps=50",
    "train.global_batch=32",  # the shape of `beside`, so that kernels measured for one serve both
    "train.microbatch=none",
    "data.corpus=synthetic",
    "data.path=none",
    "data.validation_fraction=0",
    "eval.every=0",
    f"checkpoint.every={SAVED}",
    "optimizer.warmup=0",
    "optimizer.schedule=constant",
    "mesh.data=1",
    "log.every=1",
]


def figures(run: Path) -> dict[str, Any]:
    """Medians over the steps; the stall is what the step at a save takes longer than others."""
    rows = [row for row in metrics(run) if row["step"] > WARM and "step_seconds" in row]
    seconds = statistics.median(row["step_seconds"] for row in rows)
    # The time of a save is in that of the step after it.
    saved = [row["step_seconds"] for row in rows if row["step"] % SAVED in (0, 1)]
    return {
        "step_seconds": seconds,
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "mfu": statistics.median(row["mfu"] or 0.0 for row in rows),
        "stall_seconds": max(saved, default=seconds) - seconds,
        "summary": json.loads((run / "summary.json").read_text(encoding="utf-8")),
        "kernels": json.loads((run / "config.json").read_text(encoding="utf-8"))["implementations"],
    }


def main() -> None:
    chosen = arguments(__doc__, CONFIG).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(chosen.config, Path(folder) / "run", SETTINGS + chosen.set)
        found = figures(Path(folder) / "run")
    chosen.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    parts = [f"step {1e3 * found['step_seconds']:.2f} ms"]
    parts.append(f"{found['tokens_per_second']:,.0f} tokens/s, MFU {found['mfu']:.1%}")
    parts.append(f"a save stalls {1e3 * found['stall_seconds']:.0f} ms")
    parts += beside(found["summary"])
    print("; ".join(parts))


def beside(summary: dict[str, Any]) -> list[str]:
    """Says how far the predicted figures, and XLA's of memory, are off the measured ones."""
    parts = []
    for name in ("step_seconds", "memory_bytes"):
        measured = summary[name]["measured"]
        said = [
            f"{each} {summary[name][each] / measured - 1:+.1%}"
            for each in ("compiled", "predicted")
            if measured and summary[name][each] is not None
        ]
        if said:
            unit = f"{measured / 1e9:.2f} GB" if name == "memory_bytes" else "it"
            parts.append(f"{name}: {unit} measured, {', '.join(said)}")
    return parts


if __name__ == "__main__":
    main()
