"""Classifies each instruction of a compiled step: its sort of work, and the part of the step.

A profiler trace has only the names of instructions. The text of the program has the rest.
"""

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from spmdtrain.compiled.hlo import COLLECTIVE_KINDS, computations
from spmdtrain.compiled.step_parts import OTHER, PARTS

# Sorts of work, by what bounds them.
MATMUL, NETWORK, KERNEL, COPY, ELEMENTWISE = (
    *("matmul", "communication", "kernel", "copy", "elementwise"),
)
SORTS = (MATMUL, NETWORK, KERNEL, COPY, ELEMENTWISE)
MATMULS = {"dot", "convolution", "ragged-dot"}
COPIES = {"copy", "copy-start", "copy-done", "transpose", "reshape", "bitcast", "slice"}
# Instructions that take the time of the computations that they call.
CALLERS = {"while", "conditional", "call"}
# Custom calls of libraries that are matmuls; any other is a kernel of ours or of cuDNN.
GEMM = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas)', re.I)
OP_NAME = re.compile(r'op_name="([^"]*)"')
CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
WORD = re.compile(r"[A-Za-z_]\w*")


class KindOfWork(NamedTuple):
    """An instruction: the `sort` of its work, its `part` of a step, and jax's `path` to it."""

    sort: str
    part: str
    path: str


def operations(hlo_text: str) -> dict[str, KindOfWork]:
    """Returns the instructions of a module that compute, by name; pure calls are left out.

    Raises an error of hlo.UNREADABLE for text that cannot be read.
    """
    named, _ = computations(hlo_text)
    opcodes = {
        name: {instruction.opcode for instruction in listed} for name, listed in named.items()
    }
    kinds = {}
    for instruction in itertools.chain(*named.values()):
        opcode, line = instruction.opcode, instruction.line
        if opcode in CALLERS:
            continue
        op_name = OP_NAME.search(line)
        path = op_name[1] if op_name else ""
        kinds[instruction.name] = KindOfWork(_sort(opcode, line, opcodes), _part(path), path)
    return kinds


def _sort(opcode: str, line: str, opcodes: Mapping[str, set[str]]) -> str:
    inner = {opcode}
    if called := CALLED.search(line):
        inner |= opcodes.get(called[1], set()) if opcode.startswith(("fusion", "async")) else set()
    plain = {name.removesuffix("-start").removesuffix("-done") for name in inner}
    if plain & set(COLLECTIVE_KINDS):
        return NETWORK
    if plain & MATMULS or (opcode == "custom-call" and GEMM.search(line)):
        return MATMUL
    if opcode == "custom-call":
        return KERNEL
    return COPY if opcode in COPIES else ELEMENTWISE


def _part(path: str) -> str:
    """Returns the outermost part in a path such as jit(step)/transpose(jvp(mlp))/dot_general."""
    return next((word for word in WORD.findall(path) if word in PARTS), OTHER)
