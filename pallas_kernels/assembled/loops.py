"""Finds the main loop of an assembled kernel, and what a warp issues in one turn of it.

Text is what NVIDIA's `nvdisasm -c` prints for Ampere, Hopper and Blackwell. Nothing here imports
jax.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P[T\d]+\s+)?([A-Z][\w.]*)(.*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_WARPGROUPS_MATMUL = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")  # of 4 warps
_WARPS_MATMUL = re.compile(r"HMMA\.16816\.")  # 16 x 8 x 16
_PROGRAMS_MATMUL = "UTCHMMA"  # of Blackwell: a register has its shape, and one warp issues it
_LOAD = "LDG"


@dataclass(frozen=True)
class Loop:
    """A warp's work in one turn of a loop, by the shortest path through it: masks are on longer
    paths.
    """

    flops: int  # of its share of the matmuls, where instructions say their shape
    exponentials: int
    instructions: int
    matmuls: int = 0  # Blackwell's, on any path through it
    loads: int = 0  # from memory, into registers


@dataclass(frozen=True)
class _Instruction:
    name: str
    is_conditional: bool
    target: int | None  # the place of the instruction that a branch goes to


def main_loops(text: str) -> list[Loop]:
    """Returns the loops with matmuls, the one with the most FLOPs for each instruction first.

    A kernel has several if masked tiles have a separate loop, or each warpgroup its own. Raises
    ValueError if there is none.
    """
    loops = [loop for loop in _loops(_program(text)) if loop.flops or loop.matmuls]
    if not loops:
        raise ValueError("no loop has a matmul")
    return sorted(loops, key=lambda loop: loop.instructions / (loop.flops or loop.matmuls))


def stream(text: str) -> Loop:
    """Returns the loop that loads most, or the way through a kernel without one that loads."""
    program = _program(text)
    loading = [loop for loop in _loops(program) if loop.loads]
    if loading:
        return max(loading, key=lambda loop: loop.loads)
    ends = [at for at, instruction in enumerate(program) if instruction.name == "EXIT"]
    return _counted(program[place] for place in _shortest(program, 0, ends[-1]))


def _program(text: str) -> list[_Instruction]:
    places: dict[str, int] = {}
    lines: list[tuple[str, bool, str | None]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            places[label[1]] = len(lines)
        elif match := _INSTRUCTION.match(line):
            target = _TARGET.search(match[3]) if match[2].startswith("BRA") else None
            # "BRA P2, ..." has a condition of its own.
            condition = bool(match[1]) or bool(re.match(r"\s+!?U?P\d", match[3]))
            lines.append((match[2], condition, target[1] if target else None))
    return [
        _Instruction(name, condition, None if label is None else places[label])
        for name, condition, label in lines
    ]


def _loops(program: list[_Instruction]) -> Iterator[Loop]:
    """Yields every loop: a branch back to a place that every path to that branch passes."""
    for at, instruction in enumerate(program):
        head = instruction.target
        if head is None or head > at:
            continue
        if at != head and at in _ways(program, 0, without=head):
            continue
        way = _shortest(program, head, at)
        if way:
            matmuls = sum(inner.name == _PROGRAMS_MATMUL for inner in program[head : at + 1])
            yield replace(_counted(program[place] for place in way), matmuls=matmuls)


def _next(program: list[_Instruction], at: int) -> list[int]:
    instruction = program[at]
    places = [] if instruction.target is None else [instruction.target]
    ends = instruction.target is not None or instruction.name in ("EXIT", "RET")
    if instruction.is_conditional or not ends:
        places.append(at + 1)
    return [place for place in places if place < len(program)]


def _ways(program: list[_Instruction], start: int, without: int | None) -> dict[int, int]:
    """Returns each place that can be reached, with the place before it on a shortest path."""
    before = {start: start}
    if start == without:
        return {}
    edge = [start]
    while edge:
        reached = []
        for at in edge:
            for place in _next(program, at):
                if place != without and place not in before:
                    before[place] = at
                    reached.append(place)
        edge = reached
    return before


def _shortest(program: list[_Instruction], start: int, end: int) -> list[int]:
    before = _ways(program, start, without=None)
    if end not in before:
        return []
    way = [end]
    while way[-1] != start:
        way.append(before[way[-1]])
    return way


def _counted(instructions: Iterable[_Instruction]) -> Loop:
    flops = exponentials = count = loads = 0
    for instruction in instructions:
        count += 1
        loads += instruction.name.partition(".")[0] == _LOAD
        exponentials += instruction.name.startswith("MUFU.EX2")
        if sizes := _WARPGROUPS_MATMUL.match(instruction.name):
            m, n, k = (int(size) for size in sizes.groups())
            flops += 2 * m * n * k // 4
        elif _WARPS_MATMUL.match(instruction.name):
            flops += 2 * 16 * 8 * 16
    return Loop(flops, exponentials, count, loads=loads)
