"""What XLA made of a compiled step: its memory, its collectives and the libraries and kernels it calls, i.e.
RUN/compiled.json.

The text of the optimized module is the only place that says where a collective runs. A *position* is a device's place
in the flattened mesh, which is how XLA counts partitions whatever the ids of the devices are. Everything that is not
understood raises an AssertionError with the line: a collective that is overlooked would make every check on it true.
Not counted: send and recv, which XLA makes only of host callbacks unless a flag asks for pipelined permutes.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective where it runs: a computation called from two places gives two."""

    name: str
    kind: str
    axis: str  # mesh axes whose coordinate varies inside a group, "fsdp+tensor", or "none"
    inside_loop: bool
    inside_conditional: bool
    bytes_by_dtype: Mapping[str, int]  # of its output on one device

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


def report(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, seconds: float) -> dict[str, Any]:
    """RUN/compiled.json of a step that took `seconds` to compile.

    A text that cannot be read costs a run its list of collectives and no more: `collectives` is None then, and
    `unread` is the line.
    """
    text = compiled.as_text()
    found = {"memory": memory(compiled), "calls": calls(text), "compile_seconds": seconds}
    try:
        return found | {"collectives": collectives(text, dict(mesh.shape))}
    except (AssertionError, ValueError, LookupError) as error:
        return found | {"collectives": None, "unread": str(error)}


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes on one device. `alias_bytes` of the output live in donated arguments."""
    analysis = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    return {f"{name}_bytes": getattr(analysis, f"{name}_size_in_bytes") for name in names}


def calls(hlo_text: str) -> dict[str, int]:
    """How often the text calls what XLA did not compile itself, by XLA's name of it: cuDNN, cuBLAS, Pallas kernels."""
    return dict(sorted(Counter(re.findall(r'\bcustom_call_target="([^"]+)"', hlo_text)).items()))


def collectives(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Collectives by kind, axis and inside_loop: how often in the text, and output bytes per device of one pass through
    it (a loop body once). `mesh_axes` in mesh order."""
    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for each in instructions(hlo_text, mesh_axes):
        total = totals[each.kind, each.axis, each.inside_loop]
        total[0] += 1
        total[1] += each.bytes
    keys = ("kind", "axis", "inside_loop", "count", "bytes")
    return [dict(zip(keys, (*group, *total), strict=True)) for group, total in sorted(totals.items())]


def instructions(hlo_text: str, mesh_axes: Mapping[str, int]) -> Iterator[Collective]:
    """Every collective of the module, in the order of the calls from its entry. A -start and its -done are one."""
    named, entry = computations(hlo_text)
    header = hlo_text[: hlo_text.find("\n")]
    for count, expected in (("replica_count", 1), ("num_partitions", math.prod(mesh_axes.values()))):
        found = re.search(rf"\b{count}=(\d+)", header)
        assert found is None or int(found[1]) == expected, (
            f"{count} is not {expected} (mesh {dict(mesh_axes)}): {header}"
        )
    seen = set()

    def walk(name: str, inside_loop: bool, inside_conditional: bool) -> Iterator[Collective]:
        seen.add(name)
        done = {each.operands.split()[-1]: each.type for each in named[name] if each.opcode.endswith("-done")}
        for each in named[name]:
            kind = each.opcode.removesuffix("-start")
            if kind in KINDS:
                assert kind == each.opcode or each.name in done, f"nothing ends the collective: {each.line}"
                output = each.type if kind == each.opcode else done[each.name]
                axis = "+".join(_varying(_groups(kind, each, math.prod(mesh_axes.values())), mesh_axes)) or "none"
                yield Collective(each.name, kind, axis, inside_loop, inside_conditional, _bytes(output, each.line))
            for called in each.called:
                assert called in named, f"no computation {called} in the text: {each.line}"
                yield from walk(
                    called, inside_loop or each.opcode == "while", inside_conditional or each.opcode == "conditional"
                )

    yield from walk(entry, False, False)
    for name in named.keys() - seen:
        lost = [each.line for each in named[name] if each.opcode.removesuffix("-start") in KINDS]
        assert not lost, f"nothing calls computation {name}, which holds {lost[0]}"


def events(hlo_text: str) -> dict[str, list[tuple[str, "_Instruction"]]]:
    """Computation -> what it does, in scheduled order: collectives and their -start and -done by opcode, "loop",
    "matmul" and "fusion" for the rest that takes time."""
    found = {}
    for name, instructions_ in computations(hlo_text)[0].items():
        found[name] = [(event, each) for each in instructions_ if (event := _event(each))]
    return found


def _event(instruction: "_Instruction") -> str | None:
    opcode = instruction.opcode
    if opcode == "while":
        return "loop"
    if "gemm" in instruction.line and opcode in ("custom-call", "fusion") or opcode == "dot":
        return "matmul"
    kind = opcode.removesuffix("-start").removesuffix("-done")
    return opcode if kind in KINDS or opcode == "fusion" else None


def overlaps(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Collectives by kind and axis: `count` in the text, and how many of them have a matmul or a loop between their
    start and their end. One that is not split into start and end has nothing beside it."""
    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for listed in events(hlo_text).values():
        for at, (event, each) in enumerate(listed):
            kind = event.removesuffix("-start")
            if kind not in KINDS:
                continue
            axis = "+".join(_varying(_groups(kind, each, math.prod(mesh_axes.values())), mesh_axes)) or "none"
            totals[kind, axis][0] += 1
            if event != kind:
                ends = (
                    n for n, (_, end) in enumerate(listed) if end.opcode == f"{kind}-done" and each.name in end.operands
                )
                between = {name for name, _ in listed[at : next(ends)]}
                totals[kind, axis][1] += bool(between & {"matmul", "loop"})
    keys = ("kind", "axis", "count", "beside_work")
    return [dict(zip(keys, (*group, *total), strict=True)) for group, total in sorted(totals.items())]


@dataclass(frozen=True)
class _Instruction:
    line: str
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str

    @property
    def called(self) -> list[str]:
        """The computations it runs, each once; a branch of a conditional runs at most once."""
        one = r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.-]+)"
        many = r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
        listed = [name.strip(" %") for names in re.findall(many, self.attributes) for name in names.split(",")]
        return list(dict.fromkeys([*re.findall(one, self.attributes), *listed]))


def computations(hlo_text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Computation name -> its instructions, and the name of the entry."""
    named: dict[str, list[_Instruction]] = {}
    entry = current = None
    for line in hlo_text.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$", line):
            current = start[2]
            named[current] = []
            entry = current if start[1] else entry
        elif line == "}":
            current = None
        elif current and (start := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line)):
            named[current].append(_instruction(start[1], line, start.end()))
    assert entry, "no ENTRY computation in the text"
    return named, entry


def _instruction(name: str, line: str, at: int) -> _Instruction:
    """Takes `%name = TYPE opcode(operands), attributes` apart; quoted strings (metadata) are dropped."""
    rest = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line[at:])
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[end:].strip().partition("(")
    operands_end = _closing("(" + tail) - 1
    operands = tail[: operands_end - 1].replace("%", "")
    return _Instruction(line.strip(), name, rest[:end], opcode, operands, tail[operands_end:])


def _closing(text: str) -> int:
    """The index behind the parenthesis that closes the one `text` starts with."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise AssertionError(f"unbalanced parentheses: {text}")


def _bytes(type_text: str, line: str) -> dict[str, int]:
    """`(f32[8,4]{1,0}, s32[])` -> {"f32": 128, "s32": 4}; every array of a tuple counts."""
    totals: dict[str, int] = defaultdict(int)
    for dtype, shape in re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", type_text):
        bits = {"pred": "8", "token": "0"}.get(dtype) or "".join(re.findall(r"^[a-z]+(\d+)", dtype))
        assert bits, f"unknown dtype {dtype}: {line}"
        elements = math.prod(int(size.removeprefix("<=")) for size in shape.split(",") if size)
        totals[dtype] += -(-elements * int(bits) // 8)
    return dict(totals)


def _varying(groups: np.ndarray | list[list[int]], mesh_axes: Mapping[str, int]) -> list[str]:
    """The axes along which the members of some group differ from its first."""
    shape = tuple(mesh_axes.values())
    members, firsts = np.array([(each, group[0]) for group in groups for each in group], int).reshape(-1, 2).T
    members, firsts = np.unravel_index(members, shape), np.unravel_index(firsts, shape)
    return [axis for axis, one, other in zip(mesh_axes, firsts, members, strict=True) if (one != other).any()]


def _groups(kind: str, instruction: _Instruction, positions: int) -> np.ndarray | list[list[int]]:
    """Groups of positions that talk to each other; for a permute, its (source, target) pairs."""
    attribute = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    found = re.search(rf"\b{attribute}=(.*)", instruction.attributes)
    groups = replica_groups(found[1], positions) if found else None
    if groups is None or not all(0 <= position < positions for group in groups for position in group):
        raise AssertionError(f"cannot read {attribute} over {positions} devices: {instruction.line}")
    return [] if kind == "collective-permute" and found[1].startswith("{}") else groups


def replica_groups(text: str, positions: int) -> np.ndarray | list[list[int]] | None:
    """The groups that `text` starts with, in any of XLA's spellings, or None:

    `{{0,1},{2,3}}`; `{}`, all; `[2,2]<=[4]` and `[2,2]<=[2,2]T(1,0)`, iota reshaped and transposed;
    `mesh['a'=2,'b'=2] {'a'}`, also with `, device_ids=([2,2]T(1,0))` or `(0,2,1,3)` and with a part of an axis,
    `'a':(2)4`, i.e. 4 of its indices where 2 are slower.
    """
    if re.match(r"\{\}", text):
        return [list(range(positions))]
    if found := re.match(r"\{(\{[\d,]+\}(?:,\s*\{[\d,]+\})*)\}", text):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]
    if found := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _tiles(found[2]).reshape(_numbers(found[1]))
    if found := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", text):
        return _mesh_groups(*found.groups())
    return None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _tiles(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: counted through, shaped, transposed."""
    shape, _, order = text.rstrip(")").partition("T(")
    sizes = _numbers(shape.strip("[]"))
    tiles = np.arange(math.prod(sizes)).reshape(sizes)
    return tiles.transpose(_numbers(order)) if order else tiles


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> np.ndarray | None:
    """Cuts each axis where a part of it begins or ends, then gathers the pieces that `grouped` covers."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, slower, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", grouped):
        if name not in sizes:
            return None
        parts[name].append((int(slower or 1), int(slower or 1) * int(size or sizes[name])))
    shape: list[int] = []
    inside: list[bool] = []
    for name, size in sizes.items():
        cuts = sorted({1, size, *itertools.chain(*parts[name])})
        for low, high in itertools.pairwise(cuts):
            shape.append(high // low)
            inside.append(any(begin <= low and high <= end for begin, end in parts[name]))
    if device_ids is None:
        array = np.arange(math.prod(sizes.values()))
    else:
        array = _tiles(device_ids) if device_ids.startswith("[") else np.array(_numbers(device_ids))
    order = sorted(range(len(shape)), key=lambda at: inside[at])
    members = math.prod(size for size, within in zip(shape, inside, strict=True) if within)
    return array.reshape(shape).transpose(order).reshape(-1, members)
