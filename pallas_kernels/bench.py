"""Times every implementation that does not refuse, on every case, beside measured ceilings: one table and a JSON file.

    python -m pallas_kernels.bench --json FILE [--ops attention norm loss] [--first N] [--dry]

Forward, and forward with backward less forward. Within a case implementations take turns, round after round, and
medians count; each round runs a call several times and waits once. `against` is the time of the best other one over
this one's: above 1 is faster. `ceiling` is the share of the matmul rate, or of the copy bandwidth, measured in the same
process. --dry: tiny cases, one round, interpreted kernels: it proves that the script runs, its times mean nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import norm
from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention import attention
from pallas_kernels.attention import cases as attention_cases
from pallas_kernels.choose import INTERPRET, Refused
from pallas_kernels.loss import cases as loss_cases
from pallas_kernels.loss import linear_cross_entropy, reference
from pallas_kernels.norm import api as norm_api
from pallas_kernels.norm import cases as norm_cases

Program = tuple[str, Callable, dict[str, Any], tuple[float, float], str]


def programs(op: str, dry: bool) -> Iterator[Program]:
    """(case, `forward(implementation, **arrays)`, arrays to differentiate, work of forward and backward, its unit)"""
    if op == "attention":
        for case in attention_cases.CI[:3] if dry else attention_cases.timed():
            drawn = case.draw()
            run = partial(_attention, case.options())
            given = {name: x for name, x in drawn.items() if name != "dout"}
            yield case.name, run, given, _attention_flops(case), "TFLOP/s"
    if op == "norm":
        for case in norm_cases.CI[:3] if dry else norm_cases.timed():
            there = {name: x for name, x in case.draw().items() if x is not None and name[0] != "d"}
            size = case.rows * case.width * jnp.dtype(case.dtype).itemsize
            extra = (
                case.rows * case.width * jnp.dtype(case.residual).itemsize if case.residual else 0
            )
            yield (
                case.name,
                partial(_norm, case.op),
                there,
                (2 * size + 2 * extra, 3 * size + extra),
                "GB/s",
            )
    if op == "loss":
        for case in loss_cases.CI[:1] if dry else loss_cases.timed():
            x, weight, targets, _ = case.draw()
            flops = 2.0 * case.b * case.t * case.width * case.vocab
            yield (
                case.name,
                partial(_loss, targets),
                {"x": x, "weight": weight},
                (flops, 2 * flops),
                "TFLOP/s",
            )


def _attention(options, implementation, **arrays):
    return attention(**arrays, **options, implementation=implementation)


def _norm(op, implementation, **arrays):
    return getattr(norm, op)(**arrays, implementation=implementation)


def _loss(targets, implementation, x, weight):
    if implementation == "whole":
        flat = x.reshape(-1, x.shape[-1])
        return reference.summed_loss(flat, weight, targets.reshape(-1), jnp.ones(flat.shape[:1]))
    return linear_cross_entropy(x, weight, targets)


def _attention_flops(case: attention_cases.Case) -> tuple[float, float]:
    """Of what is seen, as papers count: two matmuls forward, five backward; causal is half, packing a part of it."""
    seen = case.t * case.keys * (0.5 if case.causal else 1.0)
    if case.window:
        seen = case.t * min(case.keys, 1 + sum(side or 0 for side in case.window))
    seen /= {"three": 3}.get(case.segments, 1)
    forward = 2.0 * case.b * case.heads[0] * seen * (case.d + (case.e or case.d))
    return forward, 2.5 * forward


IMPLEMENTATIONS = {
    "attention": tuple(attention_api.IMPLEMENTATIONS),
    "norm": tuple(norm_api.IMPLEMENTATIONS),
    "loss": ("chunked", "whole"),
}


def both(run: Callable, arrays: dict[str, Any]) -> Callable:
    """Forward and backward: the output's own values are its gradient."""
    out, pull = jax.vjp(lambda given: run(**given), arrays)
    return pull(out)


def seconds(calls: dict[str, Callable], rounds: int, repeats: int) -> dict[str, float]:
    """Median time of each call; they take turns."""
    spent = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            for _ in range(repeats):
                out = calls[name]()
            jax.block_until_ready(out)
            spent[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(each) for name, each in spent.items()}


def ceilings(dry: bool, how: dict[str, int]) -> dict[str, float]:
    """Work per second of a large bfloat16 matmul and of a copy of an array larger than any cache."""
    side, long = (128, 2**16) if dry else (8192, 2**29)
    a, x = jnp.ones((side, side), jnp.bfloat16), jnp.ones(long, jnp.bfloat16)
    matmul, copy = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1)
    found = seconds({"TFLOP/s": lambda: matmul(a), "GB/s": lambda: copy(x)}, **how)
    return {"TFLOP/s": 2 * side**3 / found["TFLOP/s"], "GB/s": 4 * long / found["GB/s"]}


def measured(
    op: str, dry: bool, how: dict[str, int], limits: dict[str, float], first: int
) -> Iterator[dict[str, Any]]:
    for number, (case, run, arrays, work, unit) in enumerate(programs(op, dry)):
        if number >= first:
            return
        calls, refused = {}, {}
        for name in IMPLEMENTATIONS[op]:
            asked = name + INTERPRET if dry and name == "triton" else name
            forward = partial(run, asked)
            try:
                jax.eval_shape(lambda arrays, forward=forward: forward(**arrays), arrays)
            except Refused as error:
                refused[name] = str(error)
                continue
            calls[f"{name} forward"] = partial(
                jax.jit(lambda given, forward=forward: forward(**given)), arrays
            )
            calls[f"{name} both"] = partial(jax.jit(partial(both, forward)), arrays)
        found = seconds(calls, **how)
        times = {
            name: (found[f"{name} forward"], found[f"{name} both"])
            for name in IMPLEMENTATIONS[op]
            if name not in refused
        }
        for name, (forward, whole) in times.items():
            row = {"op": op, "case": case, "implementation": name, "unit": unit}
            for part, amount, spent in (
                ("forward", work[0], forward),
                ("backward", work[1], whole - forward),
            ):
                others = [
                    t[0] if part == "forward" else t[1] - t[0]
                    for n, t in times.items()
                    if n != name
                ]
                other = min(others, default=0)
                rate = (
                    amount / spent if spent > 0 else None
                )  # noise can eat a backward pass of microseconds
                row[part] = {
                    "ms": 1e3 * spent,
                    "rate": rate and rate / (1e12 if unit == "TFLOP/s" else 1e9),
                    "against": other / spent if rate and other > 0 else None,
                    "ceiling": rate and rate / limits[unit],
                }
            yield row
        for name, reason in refused.items():
            yield {"op": op, "case": case, "implementation": name, "refused": reason}


def line(row: dict[str, Any]) -> str:
    head = f"{row['op']:9} {row['case']:60} {row['implementation']:8}"
    if "refused" in row:
        return f"{head} {row['refused']}"
    parts = []
    for part in ("forward", "backward"):
        one = row[part]
        said = f"{part} {one['ms']:8.3f} ms"
        said += f" {one['rate']:8.1f} {row['unit']} {one['ceiling']:5.1%}" if one["rate"] else ""
        parts.append(said + (f" {one['against']:5.2f}x" if one["against"] else ""))
    return f"{head} {' | '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="where the results go as well")
    parser.add_argument("--ops", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--first", type=int, default=10**6, help="only so many cases of each op")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--dry", action="store_true", help="tiny cases, one round: only whether it runs"
    )
    chosen = parser.parse_args()
    how = {"rounds": 1, "repeats": 1} if chosen.dry else {"rounds": chosen.rounds, "repeats": 5}
    limits = ceilings(chosen.dry, how)
    device = jax.devices()[0].device_kind
    matmul, copy = limits["TFLOP/s"] / 1e12, limits["GB/s"] / 1e9
    print(f"{device}, jax {jax.__version__}: matmul {matmul:.1f} TFLOP/s, copy {copy:.0f} GB/s")
    rows = []
    for op in chosen.ops:
        for row in measured(op, chosen.dry, how, limits, chosen.first):
            rows.append(row)
            print(line(row), flush=True)
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(
                {
                    "device": device,
                    "jax": jax.__version__,
                    "dry": chosen.dry,
                    "ceilings": limits,
                    "rows": rows,
                },
                file,
            )


if __name__ == "__main__":
    main()
