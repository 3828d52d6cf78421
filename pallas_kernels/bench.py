"""Times every implementation that does not refuse, on every case, next to measured ceilings.

    python -m pallas_kernels.bench --json FILE [--ops attention norm grouped loss recurrence
                                   inverse] [--first N] [--brief] [--dry]

Prints a table, and writes it as JSON after each row. Times are of the forward pass, and of the
backward pass: of both together, less the forward pass. Within a case implementations take turns,
round after round; each round runs a call several times and waits once; medians count. Columns:

    against   the time of the best other implementation over this one's: above 1 is faster
    ceiling   the share of the matmul rate, or copy bandwidth, measured in the same process

--brief: a few telling cases of attention and norms, in few rounds, if minutes count.
--dry: tiny cases, one round, interpreted kernels. It proves that the script runs; its times mean
nothing.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import norm
from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention import attention
from pallas_kernels.attention import cases as attention_cases
from pallas_kernels.choose import INTERPRET, Refused
from pallas_kernels.grouped import api as grouped_api
from pallas_kernels.grouped import cases as grouped_cases
from pallas_kernels.grouped import grouped_matmul
from pallas_kernels.inverse import api as inverse_api
from pallas_kernels.inverse import cases as inverse_cases
from pallas_kernels.inverse import unit_inverse
from pallas_kernels.loss import cases as loss_cases
from pallas_kernels.loss import linear_cross_entropy, reference
from pallas_kernels.norm import api as norm_api
from pallas_kernels.norm import cases as norm_cases
from pallas_kernels.recurrence import api as recurrence_api
from pallas_kernels.recurrence import cases as recurrence_cases
from pallas_kernels.recurrence import scan_chunks
from pallas_kernels.recurrence.chunks import call_of
from pallas_kernels.tuning.work import scan_flops

IMPLEMENTATIONS = {
    "attention": tuple(attention_api.IMPLEMENTATIONS),
    "norm": tuple(norm_api.IMPLEMENTATIONS),
    "grouped": tuple(grouped_api.IMPLEMENTATIONS),
    "loss": ("chunked", "whole"),
    "recurrence": tuple(recurrence_api.IMPLEMENTATIONS),
    "inverse": tuple(inverse_api.IMPLEMENTATIONS),
}
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9}


class TimedCase(NamedTuple):
    """A case: `forward(implementation, **arrays)`, differentiated by all of `arrays`."""

    case: str
    forward: Callable
    arrays: dict[str, Any]
    forward_work: float  # FLOP or bytes
    backward_work: float
    unit: str  # of UNITS


@dataclass(frozen=True)
class Repeats:
    rounds: int
    calls: int  # in a round


def timed_cases(op: str, size: str) -> Iterator[TimedCase]:
    """Yields the cases of a size: "brief", "dry", or "" for all."""
    make, ci, timed = {
        "attention": (_attention_case, attention_cases.CI[:3], attention_cases.timed),
        "norm": (_norm_case, norm_cases.CI[:3], norm_cases.timed),
        "grouped": (_grouped_case, grouped_cases.CI[:1], grouped_cases.timed),
        "loss": (_loss_case, loss_cases.CI[:1], loss_cases.timed),
        "recurrence": (_recurrence_case, recurrence_cases.CI[:1], recurrence_cases.timed),
        "inverse": (_inverse_case, inverse_cases.CI[:1], inverse_cases.timed),
    }[op]
    for case in ci if size == "dry" else timed():
        if size != "brief" or _is_telling(op, case):
            yield make(case)


def _is_telling(op: str, case: Any) -> bool:
    """Returns True for what --brief times: attention on 4096 and 8192 tokens, wide norms."""
    if op == "attention":
        return case.causal and case.t in (4096, 8192) and case.heads[0] == case.heads[1]
    if op == "norm":
        return case.rows * case.width > 2**20 and case.width in (1024, 8192)
    return True


def _attention_case(case: attention_cases.Case) -> TimedCase:
    def forward(implementation, **arrays):
        return attention(**arrays, **case.options(), implementation=implementation)

    arrays = case.draw()
    arrays.pop("dout")
    # FLOPs of visible pairs, as papers count: two matmuls forward, five backward. Causal is half,
    # packing a part.
    pairs = case.t * case.keys * (0.5 if case.causal else 1.0)
    if case.window:
        left, right = case.window
        pairs = case.t * min(case.keys, 1 + (left or 0) + (right or 0))
    if case.segments == "three":
        pairs /= 3
    work = 2.0 * case.b * case.heads[0] * pairs * (case.d + (case.e or case.d))
    return TimedCase(case.name, forward, arrays, work, 2.5 * work, "TFLOP/s")


def _norm_case(case: norm_cases.Case) -> TimedCase:
    def forward(implementation, **arrays):
        return getattr(norm, case.op)(**arrays, implementation=implementation)

    drawn = case.draw()
    arrays = {}
    for name in ("x", "scale", "bias", "residual"):
        if drawn[name] is not None:
            arrays[name] = drawn[name]
    # Bytes read and written: x and y; sum, dy and dx; those of the residual.
    size = case.rows * case.width * jnp.dtype(case.dtype).itemsize
    extra = 0
    if case.residual:
        extra = case.rows * case.width * jnp.dtype(case.residual).itemsize
    return TimedCase(case.name, forward, arrays, 2 * size + 2 * extra, 3 * size + extra, "GB/s")


def _grouped_case(case: grouped_cases.Case) -> TimedCase:
    arrays = case.draw()
    expert_of_tile = arrays.pop("expert_of_tile")
    arrays.pop("dy")

    def forward(implementation, x, w):
        return grouped_matmul(x, w, expert_of_tile, implementation=implementation)

    flops = 2.0 * len(arrays["x"]) * case.width * case.out_width
    return TimedCase(case.name, forward, arrays, flops, 2 * flops, "TFLOP/s")


def _loss_case(case: loss_cases.Case) -> TimedCase:
    x, weight, targets, _ = case.draw()

    def forward(implementation, x, weight):
        if implementation == "whole":
            flat = x.reshape(-1, x.shape[-1])
            mask = jnp.ones(flat.shape[:1])
            return reference.summed_loss(flat, weight, targets.reshape(-1), mask)
        return linear_cross_entropy(x, weight, targets)

    flops = 2.0 * case.b * case.t * case.width * case.vocab
    arrays = {"x": x, "weight": weight}
    return TimedCase(case.name, forward, arrays, flops, 2 * flops, "TFLOP/s")


def _recurrence_case(case: recurrence_cases.Case) -> TimedCase:
    drawn = case.draw()
    arrays = {name: x for name, x in drawn.items() if x is not None and name not in ("do", "dlast")}

    def forward(implementation, state, **arrays):
        return scan_chunks(recurrence_cases.chunks_in(arrays), state, implementation=implementation)

    flops = scan_flops(call_of(recurrence_cases.chunks_in(drawn)))
    return TimedCase(case.name, forward, arrays, flops, 2 * flops, "TFLOP/s")


def _inverse_case(case: inverse_cases.Case) -> TimedCase:
    arrays = {"lower": case.draw()["lower"]}

    def forward(implementation, lower):
        return unit_inverse(lower, implementation=implementation)

    size = arrays["lower"].nbytes
    return TimedCase(case.name, forward, arrays, 2 * size, 3 * size, "GB/s")


def run_both(forward: Callable, arrays: dict[str, Any]) -> Callable:
    """Runs forward and backward: the output's own values serve as its gradient."""
    out, pull = jax.vjp(lambda inputs: forward(**inputs), arrays)
    return pull(out)


def median_seconds(calls: dict[str, Callable], repeats: Repeats) -> dict[str, float]:
    """Returns the median time of each call; they take turns, each round in the opposite order."""
    spent = {name: [] for name in calls}
    for call in calls.values():  # compiles
        jax.block_until_ready(call())
    for number in range(repeats.rounds):
        names = list(calls) if number % 2 == 0 else list(reversed(calls))
        for name in names:
            out = None
            start = time.perf_counter()
            for _ in range(repeats.calls):
                out = calls[name]()
            jax.block_until_ready(out)
            spent[name].append((time.perf_counter() - start) / repeats.calls)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def measure_ceilings(dry: bool, repeats: Repeats) -> dict[str, float]:
    """Returns FLOP/s of a large bfloat16 matmul, and bytes/s of a copy larger than any cache."""
    side = 128 if dry else 8192
    length = 2**16 if dry else 2**29
    a = jnp.ones((side, side), jnp.bfloat16)
    x = jnp.ones(length, jnp.bfloat16)
    matmul = jax.jit(lambda a: a @ a)
    copy = jax.jit(lambda x: x + 1)
    seconds = median_seconds({"matmul": lambda: matmul(a), "copy": lambda: copy(x)}, repeats)
    return {"TFLOP/s": 2 * side**3 / seconds["matmul"], "GB/s": 4 * length / seconds["copy"]}


def measure(
    op: str, size: str, repeats: Repeats, ceilings: dict[str, float], first: int
) -> Iterator[dict[str, Any]]:
    """Yields a row of the table for each of the `first` cases and each implementation."""
    for program in itertools.islice(timed_cases(op, size), first):
        yield from _measure_case(op, program, size == "dry", repeats, ceilings)


def _measure_case(op: str, program: TimedCase, dry: bool, repeats: Repeats, ceilings):
    calls = {}
    refused = {}
    for name in IMPLEMENTATIONS[op]:
        implementation = name + INTERPRET if dry and name == "triton" else name
        forward = partial(program.forward, implementation)
        try:
            jax.eval_shape(lambda arrays, forward=forward: forward(**arrays), program.arrays)
        except Refused as error:
            refused[name] = str(error)
            continue
        compiled_forward = jax.jit(lambda arrays, forward=forward: forward(**arrays))
        compiled_both = jax.jit(partial(run_both, forward))
        calls[f"{name} forward"] = partial(compiled_forward, program.arrays)
        calls[f"{name} both"] = partial(compiled_both, program.arrays)
    medians = median_seconds(calls, repeats)
    seconds = {}
    for name in IMPLEMENTATIONS[op]:
        if name not in refused:
            forward = medians[f"{name} forward"]
            backward = medians[f"{name} both"] - forward
            seconds[name] = {"forward": forward, "backward": backward}
    for name in seconds:
        row = {"op": op, "case": program.case, "implementation": name, "unit": program.unit}
        for part, work in (
            ("forward", program.forward_work),
            ("backward", program.backward_work),
        ):
            others = [theirs[part] for other, theirs in seconds.items() if other != name]
            best_other = min(others, default=0)
            row[part] = _figures(
                seconds[name][part], best_other, work, program.unit, ceilings[program.unit]
            )
        yield row
    for name, reason in refused.items():
        yield {"op": op, "case": program.case, "implementation": name, "refused": reason}


def _figures(seconds: float, best_other: float, work: float, unit: str, ceiling: float) -> dict:
    figures = {"ms": 1e3 * seconds, "rate": None, "against": None, "ceiling": None}
    if seconds > 0:  # noise can eat a backward pass of microseconds
        rate = work / seconds
        figures["rate"] = rate / UNITS[unit]
        figures["ceiling"] = rate / ceiling
        if best_other > 0:
            figures["against"] = best_other / seconds
    return figures


def format_row(row: dict[str, Any]) -> str:
    head = f"{row['op']:9} {row['case']:60} {row['implementation']:8}"
    if "refused" in row:
        return f"{head} {row['refused']}"
    parts = []
    for part in ("forward", "backward"):
        figures = row[part]
        text = f"{part} {figures['ms']:8.3f} ms"
        if figures["rate"]:
            text += f" {figures['rate']:8.1f} {row['unit']} {figures['ceiling']:5.1%}"
        if figures["against"]:
            text += f" {figures['against']:5.2f}x"
        parts.append(text)
    return f"{head} {' | '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--ops", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument(
        "--first", type=int, default=10**6, help="at most this many cases of each op"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--brief", action="store_const", const="brief", default="", dest="size", help="a few cases"
    )
    parser.add_argument(
        "--dry",
        action="store_const",
        const="dry",
        dest="size",
        help="tiny cases, one round: does it run?",
    )
    chosen = parser.parse_args()
    limit = {"dry": 1, "brief": 5, "": chosen.rounds}[chosen.size]
    rounds = min(limit, chosen.rounds)
    repeats = Repeats(rounds, 1 if chosen.size == "dry" else 5)
    ceilings = measure_ceilings(chosen.size == "dry", repeats)
    device = jax.devices()[0].device_kind
    matmul = ceilings["TFLOP/s"] / 1e12
    copy = ceilings["GB/s"] / 1e9
    print(f"{device}, jax {jax.__version__}: matmul {matmul:.1f} TFLOP/s, copy {copy:.0f} GB/s")
    rows = []
    table = {
        "device": device,
        "jax": jax.__version__,
        "dry": chosen.size == "dry",
        "ceilings": ceilings,
        "rows": rows,
    }
    for op in chosen.ops:
        for row in measure(op, chosen.size, repeats, ceilings, chosen.first):
            rows.append(row)
            print(format_row(row), flush=True)
            if chosen.json:
                Path(chosen.json).write_text(json.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    main()
