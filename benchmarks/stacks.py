"""Counts what a loop over layers copies into the stacks of its backward pass, and out of them."""

import re
from collections.abc import Sequence

from spmdtrain.compiled import hlo

TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
SLICES = ("dynamic-slice", "dynamic-update-slice")
# What a fusion may hold that only copies, beside the scalars of its indices.
MOVES = {
    *SLICES,
    "parameter",
    "constant",
    "bitcast",
    "copy",
    "transpose",
    "reshape",
    "slice",
    "tuple",
}


def copied_bytes(hlo_text: str) -> float:
    """Returns the bytes that a step reads and writes to move slices of stacks, by the text of its
    program.

    A slice that is moved is read once and written once. A fusion that also computes is no copy: it
    would have read or written its array anyway.
    """
    named, entry = hlo.computations(hlo_text)

    def of(name: str) -> float:
        total = 0.0
        for each in named[name]:
            if each.opcode in SLICES:
                total += 2 * _slice_bytes(each, named[name])
            elif each.opcode in ("fusion", "fusion-start"):
                inner = named[each.called[0]]
                if all(part.opcode in MOVES or _is_scalar(part) for part in inner):
                    total += sum(
                        2 * _slice_bytes(part, inner) for part in inner if part.opcode in SLICES
                    )
            elif each.opcode in ("while", "call", "conditional", "async-start"):
                found = TRIPS.search(each.line)
                total += (int(found[1]) if found else 1) * sum(map(of, each.called))
        return total

    return of(entry)


def _slice_bytes(moved: "hlo.Instruction", around: Sequence["hlo.Instruction"]) -> int:
    """Returns the bytes of the slice that an instruction reads or updates."""
    if moved.opcode == "dynamic-slice":
        return sum(hlo.bytes_by_dtype(moved.type, moved.line).values())
    update = moved.operands.split(", ")[1].split()[-1]
    of_update = next(each for each in around if each.name == update)
    return sum(hlo.bytes_by_dtype(of_update.type, of_update.line).values())


def _is_scalar(instruction: "hlo.Instruction") -> bool:
    return "[]" in instruction.type
