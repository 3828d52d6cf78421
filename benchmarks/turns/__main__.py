"""Times variants of a training step on one GPU: all compile at once, then each runs alone.

    python benchmarks/turns FOLDER [--only NAME ...] [--wait SECONDS] [--dry]

Each variant is a process of its own. All of them compile side by side, and say so; then one after
another is told to run, alone on the GPU, and ends. FOLDER/NAME.json is what it found, NAME.log what
it printed, FOLDER/turns.json all that is known so far. The first and the last are the same, which
shows how far the card has drifted.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from variants import VARIANTS, Variant

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
READY = "ready"
MOST_OF_A_TURN = 120  # seconds
# (variant, the one beside it, milliseconds that it should be faster, what follows if it is not).
RULES = (
    ("default", "loop", 4.0, "write no layers out"),
    ("in_place", "default", 0.3, "take queries, keys and values apart: docs/kernels.md"),
    ("default", "norm_apart", 0.1, "let XLA add the gradient of the stream: docs/kernels.md"),
    ("default", "norm_many", 0.0, "ship the norm in more programs"),
    ("default", "loss_by_xla", 1.0, "leave the loss to XLA"),
    ("default", "triton_gemm", 0.0, "drop the flag"),
    ("default", "cudnn", 0.0, "take cuDNN's attention"),
    ("narrow", "default", 1.0, "bfloat16 logits are not worth their rounding"),
    ("llama_float8", "llama_narrow", 0.0, "float8 costs time here"),
)


class Turn:
    """A variant's process."""

    def __init__(self, name: str, variant: Variant, folder: Path, dry: bool):
        self.name = name
        self.file = folder / f"{name}.json"
        self.log = folder / f"{name}.log"
        root = ROOT / variant.root
        flags = os.environ.get("XLA_FLAGS", "").split() + list(variant.flags)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "XLA_FLAGS": " ".join(flags),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_TRACEBACK_FILTERING": "off",
        }
        command = [sys.executable, str(HERE / "one.py"), name, str(self.file)]
        command += ["--dry"] if dry else []
        self.child = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w", encoding="utf-8"),
            text=True,
        )

    def is_ready(self, seconds: float) -> bool:
        """True once the child has compiled; False if it ended or took longer than this."""
        assert self.child.stdout is not None
        readable, _, _ = select.select([self.child.stdout], [], [], max(seconds, 0))
        return bool(readable) and self.child.stdout.readline().strip() == READY

    def run(self, seconds: float) -> dict[str, Any]:
        """Tells the child to run, waits for its end, and returns what it found."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.write("go\n")
            self.child.stdin.flush()
            code = self.child.wait(seconds)
        except (subprocess.TimeoutExpired, BrokenPipeError) as error:
            self.end()
            return {"failed": type(error).__name__}
        if code:
            return {"failed": f"code {code}"}
        return json.loads(self.file.read_text(encoding="utf-8"))

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


def run_all(names: list[str], folder: Path, wait: float, dry: bool) -> dict[str, Any]:
    """Returns what each variant measured; one that fails costs itself only."""
    begin = time.monotonic()
    results: dict[str, Any] = {}

    def is_ready(turn: Turn) -> bool:
        if turn.is_ready(wait - (time.monotonic() - begin)):
            return True
        turn.end()
        results[turn.name] = {"failed": "it did not compile in time, or ended: see its log"}
        print(turn.name, results[turn.name]["failed"], flush=True)
        return False

    # XLA times matmuls while it compiles; the first fills the cache of those times, alone.
    first = Turn(names[0], VARIANTS[names[0]], folder, dry)
    ready = [first] if is_ready(first) else []
    others = [Turn(name, VARIANTS[name], folder, dry) for name in names[1:]]
    ready += [turn for turn in others if is_ready(turn)]
    print(f"{len(ready)} compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for turn in ready:
        results[turn.name] = figures = turn.run(MOST_OF_A_TURN)
        numbers = {key: x for key, x in figures.items() if not isinstance(x, list | dict)}
        print(turn.name, json.dumps(numbers), f"{time.monotonic() - begin:.0f} s", flush=True)
        (folder / "turns.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def summary(results: dict[str, Any]) -> list[str]:
    """Returns lines that say how a step does beside PyTorch's, and what follows from it."""
    ms = {name: each["ms"] for name, each in results.items() if "ms" in each}
    lines = []
    for name, milliseconds in ms.items():
        peer = "torch_llama" if "llama" in name else "torch"
        if name != peer and peer in ms:
            memory = results[name]["peak_gb"] / (results[peer]["peak_gb"] or 1)
            speed = ms[peer] / milliseconds
            lines.append(f"{name}: {speed:.3f} of PyTorch's tokens/s, {memory:.2f} of its memory")
    for name, other, least, verdict in RULES:
        if name in ms and other in ms:
            gain = ms[other] - ms[name]
            said = "as it is" if gain >= least else verdict
            lines.append(f"{name} is {gain:.2f} ms faster than {other}: {said}")
    if "default" in ms and "again" in ms:
        drift = ms["again"] / ms["default"] - 1
        lines.append(f"the card drifted by {drift:+.1%}: what differs by less is noise")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--wait", type=float, default=240, help="seconds for all to compile")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = run_all(chosen.only, folder, chosen.wait, chosen.dry)
    print("\n".join(summary(results)))
    sys.exit(all("failed" in each for each in results.values()))


if __name__ == "__main__":
    main()
