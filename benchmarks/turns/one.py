"""One variant: compiles, says so, waits for its turn, runs, and writes what it found.

python benchmarks/turns/one.py NAME FILE.json [--dry]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "beside"), str(HERE.parent)]

from variants import VARIANTS, Variant  # noqa: E402

ROUNDS = 6
STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=VARIANTS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dry", action="store_true")
    chosen = parser.parse_args()
    variant = VARIANTS[chosen.name]
    # Whatever prints here must not look like the word that the parent waits for.
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin = time.perf_counter()
    run = KINDS[variant.what](variant, chosen.dry, chosen.file)
    compiled = time.perf_counter() - begin
    print("ready", file=parent, flush=True)
    if sys.stdin.readline().strip() != "go":
        sys.exit("nobody said go")
    found = run() | {"seconds_to_ready": round(compiled, 1)}
    chosen.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def step(variant: Variant, dry: bool, file: Path) -> Callable[[], dict[str, Any]]:
    """Our training step."""
    import jax

    from pallas_kernels.chosen import using
    from pallas_kernels.tuning import Table
    from spmdtrain.compiled.step_memory import memory_in
    from spmdtrain.data.source import open_data
    from spmdtrain.models.size import train_flops_per_token
    from spmdtrain.processes.xla_flags import set_xla_flags
    from spmdtrain.running.compile_step import compile_step, lower_step
    from spmdtrain.running.device_batches import batches as device_batches
    from spmdtrain.running.report.metrics import peak_flops
    from spmdtrain.train.fresh import init_state
    from spmdtrain.train.shard import shard

    set_xla_flags()
    device = jax.devices()[0]
    config, data = open_data(configuration(variant, dry))
    setup = shard(config, devices=[device])
    kernels = {
        call: variant.kernels.get(call, name)
        for call, name in Table().chosen(device.device_kind).items()
    }
    with using(kernels | variant.kernels) as decisions:
        lowered = lower_step(setup)
    taken = dict(decisions.taken)
    compiled, report = compile_step(setup, lowered)
    with device_batches(setup, data, 0, 0) as ahead:
        batches = [next(ahead) for _ in range(3)]
    if variant.traced:
        import gzip

        text = file.with_suffix(".hlo.txt.gz")
        with gzip.open(text, "wt") as out:
            out.write(compiled.as_text() or "")

    def run() -> dict[str, Any]:
        state = init_state(setup)
        losses = []
        for batch in batches:
            state, metrics = compiled(state, batch)
            losses.append(float(metrics["loss"]))
        rounds = []
        for _ in range(ROUNDS):
            state, metrics = compiled(state, batches[0])
            jax.block_until_ready(state)
            begin = time.perf_counter()
            for number in range(STEPS):
                state, metrics = compiled(state, batches[number % 3])
            jax.block_until_ready(state)
            rounds.append((time.perf_counter() - begin) / STEPS)
        of_trace = {}
        if variant.traced:
            from traced import traced

            of_trace = traced(lambda: jax.block_until_ready(compiled(state, batches[0])), file)
        seconds = statistics.median(rounds)
        length = setup.config.train.sequence_length
        tokens = tokens_of(setup.config)
        flops = tokens * train_flops_per_token(setup.config.model, length)
        peak = peak_flops(device.device_kind)
        return {
            "ms": 1e3 * seconds,
            "rounds_ms": [round(1e3 * each, 3) for each in rounds],
            "tokens_per_second": tokens / seconds,
            "mfu": flops / seconds / peak if peak else None,
            "peak_gb": (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9,
            "compiled_gb": memory_in(report).held / 1e9,
            "losses": losses,
            "device": device.device_kind,
            "jax": jax.__version__,
            "kernels": taken,
            **of_trace,
        }

    return run


def configuration(variant: Variant, dry: bool):
    """Returns the config of the variant's shape, with its settings."""
    from shapes import configuration as of_shape

    from spmdtrain.config.load import from_resolved, resolved

    settings = [each for each in variant.settings if not (dry and "bfloat16" in each)]
    return from_resolved(resolved(of_shape(variant.shape, dry)), settings)


def torch_step(variant: Variant, dry: bool, file: Path) -> Callable[[], dict[str, Any]]:
    """The same step in compiled PyTorch, with a table of its own kernels."""
    import torch
    from in_torch import AUTO, make_step
    from torch.nn.attention import sdpa_kernel
    from torch.profiler import ProfilerActivity, profile
    from torch_model import Transformer

    config = configuration(variant, dry)
    device = "cpu" if dry else "cuda"

    def wait():
        if not dry:
            torch.cuda.synchronize()

    def prepared() -> Callable[[], Any]:
        torch.manual_seed(0)
        model = Transformer(config.model, config.train.sequence_length).to(device)
        shape = (config.train.global_batch, config.train.sequence_length)
        tokens, targets = torch.randint(0, config.model.vocab, (2, *shape), device=device)
        step = make_step(config, model, on_cpu=dry)
        with sdpa_kernel(AUTO[dry]):
            for _ in range(3):
                step(tokens, targets)
        wait()
        return lambda: step(tokens, targets)

    # A large model would leave the others no memory while it waits.
    ready = prepared() if variant.shape == "gpt2_124m" else None

    def run() -> dict[str, Any]:
        one = ready or prepared()
        rounds = []
        with sdpa_kernel(AUTO[dry]):
            for _ in range(ROUNDS):
                one()
                wait()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    one()
                wait()
                rounds.append((time.perf_counter() - begin) / STEPS)
            kinds = [ProfilerActivity.CPU] if dry else [ProfilerActivity.CUDA]
            with profile(activities=kinds) as profiled:
                one()
                wait()
        key = "self_cpu_time_total" if dry else "self_cuda_time_total"
        table = profiled.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90)
        file.with_suffix(".table.txt").write_text(table, encoding="utf-8")
        seconds = statistics.median(rounds)
        return {
            "ms": 1e3 * seconds,
            "rounds_ms": [round(1e3 * each, 3) for each in rounds],
            "tokens_per_second": tokens_of(config) / seconds,
            "peak_gb": 0.0 if dry else torch.cuda.max_memory_allocated() / 1e9,
            "torch": torch.__version__,
        }

    return run


def tokens_of(config) -> int:
    """Returns the tokens of a step."""
    return config.train.global_batch * config.train.sequence_length


# Rows, contracted width, columns: the layers' and the logits' of GPT-2, of Llama 8B, and a large
# one as the ceiling.
MATMULS = (
    *((8192, 8192, 8192), (32768, 768, 2304), (32768, 768, 768), (32768, 768, 3072)),
    *((32768, 3072, 768), (768, 32768, 3072), (768, 32768, 2304), (8192, 768, 50304)),
    *((8192, 50304, 768), (50304, 8192, 768), (8192, 4096, 14336), (8192, 14336, 4096)),
    *((4096, 8192, 14336), (8192, 4096, 128256)),
)


def matmuls(_: Variant, dry: bool, __: Path) -> Callable[[], dict[str, Any]]:
    """TFLOP/s of bfloat16 matmuls by jax; random data, several buffers."""
    import jax
    import jax.numpy as jnp

    calls = {}
    sizes = [(64, 64, 64)] if dry else MATMULS
    for m, k, n in sizes:
        a = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
        b = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
        function = jax.jit(lambda a, b: a @ b).lower(a, b).compile()
        calls[f"{m}x{k}x{n}"] = (function, (a, b), 2e-12 * m * k * n)
    wide = jax.random.normal(jax.random.key(0), (2**10 if dry else 2**30,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1).lower(wide).compile()
    calls["copy TB/s"] = (copy, (wide,), 4e-12 * wide.size)
    return lambda: {name: work / timed(f, given) for name, (f, given, work) in calls.items()}


def timed(function: Callable, arguments: tuple, times: int = 10) -> float:
    """Seconds of a call, the median of three rounds."""
    import jax

    rounds = []
    jax.block_until_ready(function(*arguments))
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(times):
            out = function(*arguments)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - begin) / times)
    return statistics.median(rounds)


def losses(_: Variant, dry: bool, __: Path) -> Callable[[], dict[str, Any]]:
    """Milliseconds of logits, loss and gradients alone, by implementation and dtype of logits."""
    from concurrent.futures import ThreadPoolExecutor

    import jax
    import jax.numpy as jnp

    from pallas_kernels.loss import linear_cross_entropy, softmax

    b, t, e, v = (2, 16, 32, 512) if dry else (32, 1024, 768, 50304)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (b, t, e), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (v, e)) * e**-0.5).astype(jnp.bfloat16)
    targets = jax.random.randint(keys[2], (b, t), 0, v)
    kernel = "triton:interpret" if dry else "triton"
    names = ["xla", "xla/double", "xla/fourfold"]
    names += [kernel] if dry else ["triton/double", "triton/eightfold", "triton/fourfold"]

    def lowered(name: str, dtype: str):
        def loss(x, weight):
            return linear_cross_entropy(
                x, weight, targets, is_local=True, logits_dtype=dtype, implementation=name
            )

        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight)

    tiles = [(1024, 4)] if dry else [(2048, 4), (4096, 4), (4096, 8), (4096, 16), (8192, 16)]
    waiting = {}
    for name in names:
        for dtype in ("float32", "bfloat16"):
            waiting[f"{name} {dtype}"] = lowered(name, dtype)
    shipped = dict(softmax.TILES), softmax.TOGETHER
    for tile in tiles:
        for softmax.TOGETHER in (2, 4):
            softmax.TILES.update({2: tile, 4: tile})
            for dtype in ("float32", "bfloat16"):
                name = f"{names[-1]} {dtype} tile {tile} {softmax.TOGETHER}"
                waiting[name] = lowered(names[-1], dtype)
    softmax.TILES.update(shipped[0])
    softmax.TOGETHER = shipped[1]
    with ThreadPoolExecutor(4) as pool:
        compiled = dict(zip(waiting, pool.map(_compiled, waiting.values()), strict=True))

    def off(gradients, exact) -> list[float]:
        """The relative distance of each gradient from that of float32 logits by XLA."""
        pairs = zip(gradients, exact, strict=True)
        wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
        return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in wide]

    def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        exact = compiled["xla float32"](x, weight)[1]
        for name, function in compiled.items():
            if isinstance(function, str):
                found[name] = function
                continue
            given = (x, weight)
            try:
                found[name] = round(1e3 * timed(function, given), 3)
                if "tile" not in name:
                    temp = function.memory_analysis().temp_size_in_bytes
                    found[name + " temp GB"] = round(temp / 1e9, 3)
                    loss, gradients = function(*given)
                    found[name + " loss"] = float(loss) / (b * t)
                    found[name + " gradients off"] = off(gradients, exact)
            except Exception as error:  # a tile that a GPU cannot run costs its own row only
                found[name] = str(error)[:200]
        return found

    return run


def biases(_: Variant, dry: bool, __: Path) -> Callable[[], dict[str, Any]]:
    """Milliseconds of the backward passes of biases, and how far they are off."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.bias import triton, xla

    b, t, k, d, f = (2, 64, 2, 32, 512) if dry else (32, 1024, 12, 64, 3072)
    keys = jax.random.split(jax.random.key(0), 5)
    heads = [jax.random.normal(keys[0], (b, t, k, 1, d), jnp.bfloat16)]
    heads += [jax.random.normal(key, (b, t, k, d), jnp.bfloat16) for key in keys[1:3]]
    wide = [jax.random.normal(key, (b, t, f), jnp.bfloat16) for key in keys[3:]]
    name = "triton:interpret" if dry else "triton"
    calls = {}

    def add(what, function, given):
        calls[what] = (
            jax.jit(lambda *arrays: function(*arrays, name)).lower(*given).compile(),
            given,
        )

    add("heads xla", xla.joined, heads)
    add("gelu xla", xla.gelu_gradient, wide)
    for rows in (32,) if dry else (16, 32, 64):
        for programs in (4, 8):
            for warps in (4, 8):
                triton.ROWS, triton.PROGRAMS_OF_A_CORE, triton.WARPS = rows, programs, warps
                add(f"heads {rows} {programs} {warps}", triton.joined, heads)
    for block in ((16, 256),) if dry else ((16, 256), (8, 512), (16, 128), (32, 128), (8, 256)):
        for programs in (4, 8):
            for warps in (4, 8):
                triton.GELU_BLOCK, triton.PROGRAMS_OF_A_CORE, triton.WARPS = block, programs, warps
                add(f"gelu {block} {programs} {warps}", triton.gelu_gradient, wide)

    def run() -> dict[str, Any]:
        found = {}
        for what, (function, given) in calls.items():
            found[what] = round(1e3 * timed(function, given, 50), 4)
            exact = calls[what.partition(" ")[0] + " xla"][0](*given)
            pairs = zip(function(*given), exact, strict=True)
            wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
            off = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in wide]
            found[what + " off"] = [float(f"{each:.2g}") for each in off]
        return found

    return run


def recurrences(_: Variant, dry: bool, __: Path) -> Callable[[], dict[str, Any]]:
    """Milliseconds of the recurrences of linear-time layers, and how far they are off."""
    import recurrence_turn

    return recurrence_turn.prepared(dry, timed)


def _compiled(lowered):
    try:
        return lowered.compile()
    except Exception as error:  # a compiler may raise anything: it becomes the row of this tile
        return str(error)[:200]


KINDS = {
    "step": step,
    "torch_step": torch_step,
    "matmuls": matmuls,
    "losses": losses,
    "biases": biases,
    "recurrences": recurrences,
}

if __name__ == "__main__":
    main()
