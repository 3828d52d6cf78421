"""Times variants of a training step on one GPU: all compile at once, then each runs alone.

    python benchmarks/turns FOLDER [--only NAME ...] [--seconds N] [--dry]

Each variant is a process of its own. All of them compile side by side, and say so; then one after
another is told to run, alone on the GPU, and ends. FOLDER/NAME.json is what it found, NAME.log what
it printed, FOLDER/turns.json all that is known so far. The first and the last are the same, which
shows how far the card has drifted. When --seconds are nearly over, the turns before the last one
are left out: the lines at the end, which say what follows from all this, are always printed.
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
LEAST_OF_A_TURN = 15  # seconds: what the last turn is promised, and what another one has to have
SHARE_OF_COMPILING = 0.6  # of all seconds: what has not compiled by then is left out
SLOW_MATMUL = 600  # TFLOP/s
MOST_IDLE = 3.0  # milliseconds of a step
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
    ("llama_narrow", "llama", 1.0, "bfloat16 logits are not worth their rounding"),
    ("llama_eightfold", "llama_narrow", 1.0, "leave the chunks of a large vocabulary as they are"),
    ("llama_float8", "llama_narrow", 0.0, "float8 costs time here"),
)
# The same of what runs alone: (variant, one of its rows, the one beside it, milliseconds, verdict).
RULES_ALONE = (
    ("loss", "triton/fourfold float32", "xla/fourfold float32", 1.0, "leave the loss to XLA"),
    ("loss", "triton/fourfold bfloat16", "triton/fourfold float32", 1.0, "float32 logits are free"),
    ("biases", "heads 16 4 8", "heads xla", 0.02, "leave the bias of heads to XLA"),
    ("biases", "gelu (16, 256) 4 8", "gelu xla", 0.02, "leave GELU's bias to XLA"),
    *(
        ("recurrence", f"{layer}, {name}", f"{layer}, {other}", 0.1, f"leave it to {other}")
        for layer in ("Qwen3.5 27B", "Nemotron 3 Nano")
        for name, other in (("triton", "xla"), ("mosaic", "triton"))
    ),
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


def run_all(names: list[str], folder: Path, seconds: float, dry: bool) -> dict[str, Any]:
    """Returns what each variant measured; one that fails costs itself only."""
    begin = time.monotonic()
    results: dict[str, Any] = {}

    def is_ready(turn: Turn) -> bool:
        if turn.is_ready(SHARE_OF_COMPILING * seconds - (time.monotonic() - begin)):
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
        left = begin + seconds - time.monotonic()
        if turn is not ready[-1]:
            left -= LEAST_OF_A_TURN
        if left < LEAST_OF_A_TURN and turn is not ready[-1]:
            turn.end()
            results[turn.name] = figures = {"failed": "no time was left for it"}
        else:
            results[turn.name] = figures = turn.run(min(left, MOST_OF_A_TURN))
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
    for variant, row, other, least, verdict in RULES_ALONE:
        alone = results.get(variant, {})
        # In place of an implementation that refuses the GPU stands the reason.
        if isinstance(alone.get(row), float) and isinstance(alone.get(other), float):
            gain = alone[other] - alone[row]
            said = "as it is" if gain >= least else verdict
            lines.append(f"{variant}: {row} is {gain:.2f} ms faster than {other}: {said}")
    lines += of_matmuls(results.get("matmuls", {}))
    lines += [line for name, each in results.items() for line in of_idle(name, each)]
    if "default" in ms and "again" in ms:
        drift = ms["again"] / ms["default"] - 1
        lines.append(f"the card drifted by {drift:+.1%}: what differs by less is noise")
    return lines


def of_matmuls(found: dict[str, Any]) -> list[str]:
    """Returns what follows from the slowest matmul with GPT-2's width of 768."""
    speeds = {shape: x for shape, x in found.items() if "768" in shape.split("x")}
    if not speeds:
        return []
    slowest = min(speeds, key=speeds.__getitem__)
    slow = speeds[slowest] < SLOW_MATMUL
    said = "epilogues and layouts come before kernels" if slow else "as it is"
    return [f"matmuls: {slowest} reaches {speeds[slowest]:.0f} TFLOP/s, the slowest: {said}"]


def of_idle(name: str, found: dict[str, Any]) -> list[str]:
    """Returns what follows from the time that a traced step idled between its kernels."""
    if "idle_between_ms" not in found:
        return []
    idle = found["idle_between_ms"]
    said = "launches and CUDA graphs come first" if idle > MOST_IDLE else "as it is"
    return [f"{name}: {idle:.2f} ms between kernels: {said}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=480, help="for all of it")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = run_all(chosen.only, folder, chosen.seconds, chosen.dry)
    print("\n".join(summary(results)))
    sys.exit(all("failed" in each for each in results.values()))


if __name__ == "__main__":
    main()
