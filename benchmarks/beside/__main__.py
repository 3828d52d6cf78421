"""Our training step beside the same model by hand, on one GPU: in jax, in PyTorch, in MaxText.

    make bench-torch, or
    python benchmarks/beside [--shapes gpt2_124m llama_1b] [--rounds N] [--steps N]
                             [--json FILE] [--dry]

`ours` is the framework's own compiled step on its own batches, with the kernels that were measured
on this GPU, and `loop` the same with `train.scan_layers = true`. `bare` is one jax.jit written
by hand, `torch` plain PyTorch with torch.compile, flash attention, autocast to bfloat16 over
float32 weights and fused AdamW. All start from the same values and batches, and their first
losses must agree with ours. `maxtext` has values of its own. Each round is a process of its own,
which compiles, warms up and takes `steps` steps; all take turns. Figures are medians over rounds of
the mean step time, and are written after each round.

PyTorch and MaxText are no dependencies. Each may have an environment of its own, as their CUDA
libraries are others: .venv-torch and .venv-maxtext are looked for. Who is missing, or fails, is
left out with a line, as is a shape that this GPU has no memory for. `--dry`: tiny shapes on the
CPU, in float32, to see that it runs and that the models are the same.

The shapes shakespeare and gpt_6m are for CPUs (`make bench-cpu`): float32, and eager PyTorch. Their
CPU seconds, which all threads took together, are compared too: on a busy machine they say more.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shapes import DRY, ON_CPU, configuration, least_bytes

ROOT = Path(__file__).parents[2]
# Relative, by `on_cpu`, of the first loss and of those after it: bfloat16 rounds at other places,
# and Adam makes a whole step of a gradient that is 0 but for rounding, as a key bias has.
LOSS_TOLERANCE = {False: (2e-3, 5e-3), True: (1e-5, 1e-3)}
OURS = "ours"
LOOP = "loop"
CONTENDERS = (OURS, LOOP, "bare", "torch", "maxtext")
OF_DEVICE = ("device", "parameters", "tokens", "flops_per_token", "peak")


def in_child(who: str, shape: str, chosen: argparse.Namespace) -> None:
    """Measures one contender in this process, and prints what it found."""
    chosen.on_cpu = chosen.dry or shape in ON_CPU
    config = configuration(shape, chosen.dry)
    if who == "torch":
        import in_torch

        found = in_torch.measured(config, chosen)
    elif who == "maxtext":
        import in_maxtext

        found = in_maxtext.measured(config, chosen)
    else:
        import in_jax

        if who == LOOP:
            as_loop = config.train.model_copy(update={"scan_layers": True})
            config = config.model_copy(update={"train": as_loop})
        found = in_jax.measured(config, chosen, by_hand=who == "bare")
    print(json.dumps(found))


def python_of(who: str) -> str | None:
    """Returns the interpreter that has what a contender needs; None where nothing has it."""
    if who in (OURS, LOOP, "bare"):
        return sys.executable
    own = ROOT / f".venv-{who}" / "bin" / "python"
    needed = {"torch": ("torch",), "maxtext": ("maxtext", "MaxText")}[who]
    for python in (str(own), sys.executable):
        code = "import importlib.util as i, sys; sys.exit(not any(map(i.find_spec, sys.argv[1:])))"
        if Path(python).exists() and not subprocess.run([python, "-c", code, *needed]).returncode:
            return python
    return None


def contenders(on_cpu: bool) -> dict[str, str]:
    """Returns who takes part, and their interpreters; says who does not."""
    found = {who: python for who in CONTENDERS if (python := python_of(who)) is not None}
    for who in CONTENDERS:
        if who not in found:
            print(f"{who} is not installed: it is left out", flush=True)
    if on_cpu:  # it has no model for one
        found.pop("maxtext", None)
    return found


def child(python: str, who: str, shape: str, start: Path, arguments: list[str]) -> dict[str, Any]:
    """Returns what a contender found in a process of its own, or {"failed": why}."""
    command = [python, str(Path(__file__).parent), *arguments, "--child", who, shape, str(start)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_TRACEBACK_FILTERING": "off"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"code {done.returncode}"
        print(said[-4000:], file=sys.stderr, flush=True)
        return {"failed": said.splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


class Comparison:
    """The rounds of one shape so far."""

    def __init__(self, shape: str, on_cpu: bool):
        self.shape = shape
        self.on_cpu = on_cpu
        self.rounds: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}

    def add(self, who: str, found: dict[str, Any]) -> None:
        """Takes a round. One that failed, or trained another model, ends its contender."""
        why = found.get("failed")
        if why is None and who not in (OURS, "maxtext"):
            why = self._complaint(found)
        if why is None:
            self.rounds.setdefault(who, []).append(found)
        else:
            self.failed[who] = why
            self.rounds.pop(who, None)

    def _complaint(self, found: dict[str, Any]) -> str | None:
        wanted = self.rounds[OURS][0]
        if found["parameters"] != wanted["parameters"]:
            return f"another model: {found['parameters']} parameters, not {wanted['parameters']}"
        first, later = LOSS_TOLERANCE[self.on_cpu]
        for i, two in enumerate(zip(found["losses"], wanted["losses"], strict=True)):
            if not math.isclose(*two, rel_tol=later if i else first):
                return f"another model: losses {found['losses']}, not {wanted['losses']}"
        return None

    def document(self) -> dict[str, Any]:
        """Returns each contender's figures, and the ratios of their times to ours: above 1 where
        ours is faster.
        """
        result: dict[str, Any] = {"shape": self.shape, "failed": self.failed}
        if OURS not in self.rounds:
            return result
        first = self.rounds[OURS][0]
        result |= {name: first[name] for name in OF_DEVICE}
        for who, found in self.rounds.items():
            seconds = statistics.median(each["seconds"] for each in found)
            rate = first["tokens"] / seconds
            kept = ("version", "losses", "peak_bytes", "compiled_bytes")
            result[who] = {name: found[0].get(name) for name in kept} | {
                "seconds": seconds,
                "rounds": [each["seconds"] for each in found],
                "tokens_per_second": rate,
                "mfu": first["flops_per_token"] * rate / first["peak"] if first["peak"] else None,
            }
            result[f"{who}_to_ours"] = seconds / result[OURS]["seconds"]
            if self.on_cpu:
                result[who]["cpu_seconds"] = statistics.median(x["cpu_seconds"] for x in found)
                of_ours = result[OURS]["cpu_seconds"]
                result[f"{who}_to_ours_cpu"] = result[who]["cpu_seconds"] / of_ours
        return result


def line(result: dict[str, Any], who: str) -> str:
    found = result[who]
    mfu = "no peak known" if found["mfu"] is None else f"mfu {found['mfu']:.1%}"
    low, high = (1e3 * pick(found["rounds"]) for pick in (min, max))
    if "cpu_seconds" in found:
        mfu = f"{1e3 * found['cpu_seconds']:.1f} ms of CPU"
    held = "" if found["peak_bytes"] is None else f"  {found['peak_bytes'] / 1e9:.2f} GB"
    return (
        f"{result['shape']:10} {who:7} {1e3 * found['seconds']:9.1f} ms ({low:.1f} to {high:.1f})  "
        f"{found['tokens_per_second']:10.0f} tokens/s  {mfu}{held}  {found['version']}"
    )


def last_line(results: list[dict[str, Any]]) -> str:
    """Returns all ratios in one line, the headline of the hour."""
    parts = []
    for result in results:
        others = [who for who in CONTENDERS[1:] if who in result]
        for what, ending in (("time", ""), ("CPU seconds", "_cpu")):
            names = [(who, f"{who}_to_ours{ending}") for who in others]
            ratios = [f"{who} {result[name]:.2f}" for who, name in names if name in result]
            if ratios:
                parts.append(f"{result['shape']}: {what} of {', '.join(ratios)} of ours")
    return "; ".join(parts) or "ours alone"


def memory_here() -> float:
    """Returns the bytes of the smallest GPU here; infinite where no driver tells."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(float(each) for each in done.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return math.inf


def compare_all(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    here = contenders(chosen.dry or ON_CPU.keys() >= set(chosen.shapes))
    arguments = ["--steps", str(chosen.steps), "--warmup", str(chosen.warmup)]
    arguments += ["--dry"] * chosen.dry
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for shape in chosen.shapes:
            needed = least_bytes(configuration(shape, chosen.dry))
            if needed > (room := memory_here()):
                text = f"needs {needed / 1e9:.0f} GB, this GPU has {room / 1e9:.0f}"
                print(f"{shape} is left out: it {text}", flush=True)
                results.append({"shape": shape, "failed": {OURS: text}})
                continue
            on_cpu = chosen.dry or shape in ON_CPU
            comparison = Comparison(shape, on_cpu)
            results.append({})
            for _ in range(chosen.rounds):
                for who, python in here.items():
                    if who in comparison.failed or OURS in comparison.failed:
                        continue
                    if who == "maxtext" and (on_cpu or shape == "gpt2_124m"):
                        continue
                    start = Path(directory) / f"{shape}.npz"
                    comparison.add(who, child(python, who, shape, start, arguments))
                    results[-1] = comparison.document()
                    if who in comparison.failed:
                        print(f"{shape} {who} failed: {comparison.failed[who]}", flush=True)
                    else:
                        print(line(results[-1], who), flush=True)
                    if chosen.json:
                        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shapes", nargs="+", default=["gpt2_124m", "llama_1b"], choices=[*DRY, *ON_CPU]
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="processes of each (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="timed in each (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=int, default=5, help="steps before that (default: %(default)s)"
    )
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, one round")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="writes the figures there after each round"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.dry:
        chosen.rounds, chosen.steps, chosen.warmup = 1, 2, 1
    if chosen.child:
        who, shape, chosen.start = *chosen.child[:2], Path(chosen.child[2])
        return in_child(who, shape, chosen)
    results = compare_all(chosen)
    print(last_line(results))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    failed = any(OURS in each["failed"] and not _had_no_room(each) for each in results)
    strangers = [why for each in results for why in each["failed"].values() if "another" in why]
    sys.exit("; ".join(strangers) if strangers else int(failed))


def _had_no_room(result: dict[str, Any]) -> bool:
    return "this GPU has" in result["failed"][OURS]


if __name__ == "__main__":
    main()
