"""Classifies each instruction of a compiled step: its sort of work, and the part that it belongs
to.

A profiler trace has only the names of instructions. The text of the program says the rest.
"""

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
# Instructions whose time is that of what they call.
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
    """Returns the instructions of a module that do work, by name; those that only call are left
    out.

    Raises an error of hlo.UNREADABLE for text that cannot be read.
    """
    named, _ = computations(hlo_text)
    opcodes = {name: {each.opcode for each in listed} for name, listed in named.items()}
    found = {}
    for each in (each for listed in named.values() for each in listed):
        if each.opcode in CALLERS:
            continue
        path = OP_NAME.search(each.line)
        text = path[1] if path else ""
        found[each.name] = KindOfWork(_sort(each.opcode, each.line, opcodes), _part(text), text)
    return found


def _sort(opcode: str, line: str, opcodes: Mapping[str, set[str]]) -> str:
    inner = {opcode}
    if called := CALLED.search(line):
        inner |= opcodes.get(called[1], set()) if opcode.startswith(("fusion", "async")) else set()
    plain = {each.removesuffix("-start").removesuffix("-done") for each in inner}
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
