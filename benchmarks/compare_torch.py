"""Our training step against the same model in plain PyTorch, on one GPU: tokens/s and MFU in
bfloat16.

    make bench-torch, or
    python benchmarks/compare_torch.py [--shapes gpt2_124m llama_1b] [--rounds N] [--steps N]
                                       [--json FILE] [--dry]

Ours is the framework's own compiled step on its own batches. Theirs (torch_model.py) starts from
the same values and takes the same batches: torch.compile, flash attention through SDPA, autocast to
bfloat16 over float32 weights, fused AdamW, the same clipping. Each round is a process of its own,
which compiles, warms up and takes `steps` steps; ours and theirs take turns. Figures are medians
over rounds of the mean step time. The first losses of both must agree.

Without torch (which is no dependency: install it beside) only ours is timed. `--dry`: tiny shapes
on the CPU, in float32, without torch.compile, to see that it runs and that the models are the same.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.config.load import from_resolved, load, resolved
from spmdtrain.config.schema import (
    AdamW,
    CheckpointConfig,
    DataConfig,
    Llama,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from spmdtrain.data.source import open_data
from spmdtrain.running.compile_step import compile_step, lower_step
from spmdtrain.running.device_batches import batches as device_batches

GPT2 = Path(__file__).parents[1] / "configs" / "gpt2_124m.toml"
ALONE = ["data.corpus=synthetic", "data.path=none", "data.validation_fraction=0.0", "eval.every=0",
         "optimizer.schedule=constant", "optimizer.warmup=0", "mesh.data=1"]  # fmt: skip
DRY = {
    "gpt2_124m": ["model.layers=2", "model.embed=32", "model.heads=2", "model.vocab=256",
                  "train.sequence_length=32"],
    "llama_1b": ["model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2",
                 "model.head_dim=8", "model.ffn=64", "model.vocab=256", "train.sequence_length=32"],
}  # fmt: skip
# Relative, by `dry`, of the first loss and of those after it: bfloat16 rounds at other places, and
# Adam makes a whole step of a gradient that is 0 but for rounding, as a key bias has.
LOSS_TOLERANCE = {False: (2e-3, 5e-3), True: (1e-5, 1e-3)}
DRY_SCALE = 8.0  # of the first values
FIRST = 3  # of how many steps the losses are compared


def llama_1b() -> RunConfig:
    """Llama 3.2 1B: 1.24 G parameters."""
    return RunConfig(
        model=Llama(
            layers=16, embed=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256,
            rope_theta=500_000.0, tied=True,
        ),
        train=TrainConfig(global_batch=8, sequence_length=2048),
        optimizer=AdamW(learning_rate=3e-4, weight_decay=0.1),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(corpus="synthetic"),
        checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip


def configuration(shape: str, dry: bool) -> RunConfig:
    sizes = [*DRY[shape], "train.global_batch=4", "precision.compute=float32"] if dry else []
    if shape == "gpt2_124m":
        batch = ["train.microbatch=none", "train.global_batch=32"]
        return load(GPT2, [*ALONE, *batch, *sizes])
    return from_resolved(resolved(llama_1b()), [*ALONE, *sizes])


# --- one process of one round ---------------------------------------------------------------------


def ours(config: RunConfig, chosen: argparse.Namespace) -> dict[str, Any]:
    """Writes the first values and batches to `chosen.start` if they are not there."""
    if chosen.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax
    import jax

    from spmdtrain.models.size import train_flops_per_token
    from spmdtrain.running.report.metrics import peak_flops
    from spmdtrain.train.fresh import init_state
    from spmdtrain.train.shard import shard

    device = jax.devices()[0]
    if device.platform == "cpu" and not chosen.dry:
        sys.exit("there is no GPU here; --dry runs tiny shapes on the CPU")
    config, data = open_data(config)
    setup = shard(config, devices=[device])
    state = init_state(setup)
    # Such small matrices do hardly anything: what they compute would not show in the loss.
    if chosen.dry:
        state = replace(
            state,
            params={name: x * (DRY_SCALE if x.ndim > 1 else 1) for name, x in state.params.items()},
        )
    with device_batches(setup, data, 0, 0) as ahead:
        batches = [next(ahead) for _ in range(FIRST)]
    if not chosen.start.exists():
        first = {f"batch{i}.{name}": np.asarray(batch[name][0]) for i, batch in enumerate(batches)
                 for name in ("tokens", "targets")}  # fmt: skip
        np.savez(chosen.start, **{name: np.asarray(x) for name, x in state.params.items()}, **first)
    count = sum(x.size for x in state.params.values())
    step, _ = compile_step(setup, lower_step(setup))
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    for i in range(chosen.warmup):
        state, metrics = step(state, batches[i % FIRST])
    jax.block_until_ready(state)
    start = time.perf_counter()
    for i in range(chosen.steps):
        state, metrics = step(state, batches[i % FIRST])
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - start) / chosen.steps
    model, train = setup.config.model, setup.config.train
    return {
        "seconds": seconds,
        "losses": losses,
        "parameters": count,
        "tokens": train.global_batch * train.sequence_length,
        "flops_per_token": train_flops_per_token(model, train.sequence_length),
        "peak": peak_flops(device.device_kind),
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
    }


def theirs(config: RunConfig, chosen: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch_model import Transformer

    device = "cpu" if chosen.dry else "cuda"
    given = dict(np.load(chosen.start))
    pairs = [
        [
            torch.from_numpy(given.pop(f"batch{i}.{name}")).long().to(device)
            for name in ("tokens", "targets")
        ]
        for i in range(FIRST)
    ]
    model = Transformer(config.model, config.train.sequence_length)
    model.take(given)
    model.to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    asked = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=asked.learning_rate,
        betas=(asked.beta1, asked.beta2),
        eps=asked.epsilon,
        weight_decay=asked.weight_decay,
        fused=True,
    )
    run = model if chosen.dry else torch.compile(model)

    def step(tokens, targets):
        with torch.autocast(device, torch.bfloat16, enabled=not chosen.dry):
            loss = run(tokens, targets)
        loss.backward()
        if config.train.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.MATH] if chosen.dry else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        losses = [float(step(*pair)) for pair in pairs]
        for i in range(chosen.warmup):
            step(*pairs[i % FIRST])
        wait()
        start = time.perf_counter()
        for i in range(chosen.steps):
            step(*pairs[i % FIRST])
        wait()
    return {
        "seconds": (time.perf_counter() - start) / chosen.steps,
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "version": f"torch {torch.__version__}",
    }


# --- all of them ----------------------------------------------------------------------------------


def child(who: str, shape: str, start: Path, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--child", who, shape, str(start)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{who} of {shape} failed: {done.stdout.strip() or 'see above'}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(shape: str, rounds: int, contenders: list[str], arguments: list[str]) -> dict[str, Any]:
    """Per contender its rounds and their median; ratios of theirs to ours, above 1 where ours is
    faster.
    """
    seen: dict[str, list[dict[str, Any]]] = {who: [] for who in contenders}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):
            for who in contenders:
                seen[who].append(child(who, shape, Path(directory) / "start.npz", arguments))
    first = seen["ours"][0]
    result = {
        "shape": shape,
        **{name: first[name] for name in ("device", "parameters", "tokens", "flops_per_token")},
    }
    for who, found in seen.items():
        seconds = statistics.median(each["seconds"] for each in found)
        rate = first["tokens"] / seconds
        result[who] = {
            "version": found[0]["version"],
            "seconds": seconds,
            "rounds": [each["seconds"] for each in found],
            "tokens_per_second": rate,
            "mfu": first["flops_per_token"] * rate / first["peak"] if first["peak"] else None,
            "losses": found[0]["losses"],
        }
        assert_same_model(found[0], first, "--dry" in arguments)
    if "theirs" in result:
        result["theirs_to_ours"] = result["theirs"]["seconds"] / result["ours"]["seconds"]
    return result


def assert_same_model(found: dict[str, Any], wanted: dict[str, Any], dry: bool) -> None:
    assert found["parameters"] == wanted["parameters"], (
        f"{found['parameters']} parameters, not {wanted['parameters']}"
    )
    first, later = LOSS_TOLERANCE[dry]
    for i, two in enumerate(zip(found["losses"], wanted["losses"], strict=True)):
        near = math.isclose(*two, rel_tol=later if i else first)
        assert near, f"different models: losses {found['losses']}, not {wanted['losses']}"


def line(result: dict[str, Any], who: str) -> str:
    found = result[who]
    mfu = "no peak known" if found["mfu"] is None else f"mfu {found['mfu']:.1%}"
    low, high = (1e3 * pick(found["rounds"]) for pick in (min, max))
    return (
        f"{result['shape']:10} {who:7} {1e3 * found['seconds']:9.1f} ms ({low:.1f} to {high:.1f})  "
        f"{found['tokens_per_second']:10.0f} tokens/s  {mfu}  {found['version']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(DRY), choices=DRY)
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
        "--json", type=Path, metavar="FILE", help="writes the figures there as well"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.dry:
        chosen.rounds, chosen.steps, chosen.warmup = 1, 2, 1
    if chosen.child:
        who, shape, chosen.start = *chosen.child[:2], Path(chosen.child[2])
        print(
            json.dumps(
                {"ours": ours, "theirs": theirs}[who](configuration(shape, chosen.dry), chosen)
            )
        )
        return
    contenders = ["ours", "theirs"]
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: ours only")
        contenders = ["ours"]
    arguments = ["--steps", str(chosen.steps), "--warmup", str(chosen.warmup)] + [
        "--dry"
    ] * chosen.dry
    results = []
    for shape in chosen.shapes:
        results.append(compare(shape, chosen.rounds, contenders, arguments))
        for who in contenders:
            print(line(results[-1], who), flush=True)
    print(json.dumps(results))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
