"""Reads memory, collectives and library calls off a compiled step, for RUN/compiled.json.

Only the text of the optimized module says where a collective runs. A *partition* is a device's
number in the flattened mesh: XLA counts devices that way, whatever their ids are.

Unreadable text raises an AssertionError with the line, because an overlooked collective would make
every check on it pass. send and recv are not counted: XLA makes them only of host callbacks, unless
a flag asks for pipelined permutes.
"""

import contextlib
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from spmdtrain.compiled.step_memory import memory_of

COLLECTIVE_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# Groups of partitions that exchange data: [groups, members], or lists of unequal lengths.
Groups = np.ndarray | list[list[int]]


@dataclass(frozen=True)
class Collective:
    """One collective where it runs: a computation that is called from two places gives two."""

    name: str
    kind: str
    axis: str  # mesh axes whose coordinate varies inside a group, "fsdp+tensor", or "none"
    inside_loop: bool
    inside_conditional: bool
    bytes_by_dtype: Mapping[str, int]  # of its output on one device
    members: int = 1  # devices of a group, which may be fewer than those along its axes
    passes: int = 1  # how often a step runs it, if loops of unknown length run once
    in_rounds: bool = False  # inside such a loop
    beside_work: bool = False  # a matmul or a loop comes between its start and its end

    @property
    def bytes(self) -> int:
        """The bytes of its output on one device, in all dtypes."""
        return sum(self.bytes_by_dtype.values())


# Raised by the functions below for text that they cannot read.
UNREADABLE = (AssertionError, ValueError, LookupError)


def report(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, seconds: float
) -> dict[str, Any]:
    """Returns the contents of RUN/compiled.json for a step that took `seconds` to compile.

    If the text cannot be read, a run loses only its list of collectives: `collectives` is None
    then, and `unread` holds the line. `traffic` is left out if the text does not say how often a
    loop runs.
    """
    text = compiled.as_text() or ""
    held = asdict(memory_of(compiled))
    contents = {"memory": held, "calls": calls(text), "compile_seconds": seconds}
    try:
        listed = list(instructions(text, mesh.shape))
    except UNREADABLE as error:
        return contents | {"collectives": None, "unread": str(error)}
    contents |= {"collectives": _counted(listed)}
    with contextlib.suppress(*UNREADABLE):
        contents |= {"traffic": _sent(listed)}
    return contents


def calls(hlo_text: str) -> dict[str, int]:
    """Counts calls of code that XLA did not compile itself: cuDNN, cuBLAS, Pallas kernels.

    The keys are XLA's names of them; a call in a loop counts once.
    """
    targets = re.findall(r'custom_call_target="([^"]+)"', hlo_text)
    return dict(sorted(Counter(targets).items()))


def collectives(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Counts collectives by kind, axis and inside_loop.

    `count` is their number in the text, `bytes` their output per device in one pass through it (a
    loop body once). `mesh_axes` are the sizes of all axes in mesh order.
    """
    return _counted(instructions(hlo_text, mesh_axes))


def _counted(listed: Iterable[Collective]) -> list[dict[str, Any]]:
    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for collective in listed:
        total = totals[collective.kind, collective.axis, collective.inside_loop]
        total[0] += 1
        total[1] += collective.bytes
    keys = ("kind", "axis", "inside_loop", "count", "bytes")
    return [
        dict(zip(keys, (*group, *total), strict=True)) for group, total in sorted(totals.items())
    ]


def instructions(hlo_text: str, mesh_axes: Mapping[str, int]) -> Iterator[Collective]:
    """Yields every collective of the module, in the order of the calls from its entry.

    A -start and its -done are one collective.
    """
    named, entry = computations(hlo_text)
    _check_header(hlo_text[: hlo_text.find("\n")], mesh_axes)
    visited = set()

    def walk(name: str, around: Collective) -> Iterator[Collective]:
        """Yields the collectives of a computation; `around` has properties that they inherit."""
        visited.add(name)
        beside_work = _beside_work(named[name])
        type_of_start = {}  # the -done's type counts: a -start's output includes its input
        for instruction in named[name]:
            if instruction.opcode.endswith("-done"):
                type_of_start[instruction.operands.split()[-1]] = instruction.type
        for instruction in named[name]:
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVE_KINDS:
                output = instruction.type
                if kind != instruction.opcode:
                    assert instruction.name in type_of_start, (
                        f"nothing ends the collective: {instruction.line}"
                    )
                    output = type_of_start[instruction.name]
                groups = _groups(kind, instruction, math.prod(mesh_axes.values()))
                varying = _varying_axes(groups, mesh_axes)
                yield replace(
                    around,
                    name=instruction.name,
                    kind=kind,
                    axis="+".join(varying) or "none",
                    members=max(map(len, groups)) if varying else 1,
                    bytes_by_dtype=bytes_by_dtype(output, instruction.line),
                    beside_work=around.beside_work or instruction.name in beside_work,
                )
            for called in instruction.called:
                assert called in named, f"no computation {called} in the text: {instruction.line}"
                # XLA wraps a collective that has no -start of its own in an async-start.
                is_beside = instruction.opcode == "async-start" and instruction.name in beside_work
                yield from walk(
                    called, _inside(instruction, replace(around, beside_work=is_beside))
                )

    yield from walk(entry, Collective("", "", "", False, False, {}))
    for name in named.keys() - visited:
        for instruction in named[name]:
            kind = instruction.opcode.removesuffix("-start")
            assert kind not in COLLECTIVE_KINDS, (
                f"nothing calls computation {name}, which holds {instruction.line}"
            )


def _check_header(header: str, mesh_axes: Mapping[str, int]) -> None:
    """Checks that the module was partitioned over this mesh."""
    partitions = math.prod(mesh_axes.values())
    for count, expected in (("replica_count", 1), ("num_partitions", partitions)):
        match = re.search(rf"\b{count}=(\d+)", header)
        assert match is None or int(match[1]) == expected, (
            f"{count} is not {expected} (mesh {dict(mesh_axes)}): {header}"
        )


def events(hlo_text: str) -> dict[str, list[tuple[str, "Instruction"]]]:
    """Returns the (event, instruction) pairs of each computation, in scheduled order.

    Only events that take time are listed. The event of a collective, of its -start and of its -done
    is the opcode; others are "loop", "matmul" and "fusion".
    """
    named, _ = computations(hlo_text)
    pairs = {}
    for name, listed in named.items():
        pairs[name] = []
        for instruction in listed:
            event = _event(instruction)
            if event:
                pairs[name].append((event, instruction))
    return pairs


def _event(instruction: "Instruction") -> str | None:
    opcode = instruction.opcode
    if opcode == "while":
        return "loop"
    is_gemm = opcode in ("custom-call", "fusion") and "gemm" in instruction.line
    is_grouped = opcode == "custom-call" and "/grouped_matmul" in instruction.line
    if is_gemm or is_grouped or opcode == "dot":
        return "matmul"
    kind = opcode.removesuffix("-start").removesuffix("-done")
    if kind in COLLECTIVE_KINDS or opcode == "fusion":
        return opcode
    return None


def overlaps(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Counts, by kind and axis, the collectives that overlap with work.

    `count` is their number in the text; `beside_work` is the number of them with a matmul or a loop
    between their start and their end. One that is not split in two overlaps with nothing.
    """
    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for collective in instructions(hlo_text, mesh_axes):
        total = totals[collective.kind, collective.axis]
        total[0] += 1
        total[1] += collective.beside_work
    keys = ("kind", "axis", "count", "beside_work")
    return [
        dict(zip(keys, (*group, *total), strict=True)) for group, total in sorted(totals.items())
    ]


def traffic(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the bytes that a device sends in one step, by kind, axis and inside_loop.

    A loop's body counts once for each time that it runs. The rounds in which tokens travel to their
    experts count as one: balanced tokens need no more. `bytes` are the bytes of the outputs, `sent`
    the bytes that a ring of that kind sends for them, and `sent_beside_work` the part of `sent`
    with a matmul or a loop between start and end.
    """
    return _sent(instructions(hlo_text, mesh_axes))


def _sent(listed: Iterable[Collective]) -> list[dict[str, Any]]:
    totals: dict[tuple, list[float]] = defaultdict(lambda: [0, 0, 0])
    for collective in listed:
        known = not collective.in_rounds or "expert" in collective.axis.split("+")
        assert known, f"nothing states how often the loop around {collective.name} runs"
        sent = (
            collective.passes
            * collective.bytes
            * sent_per_output(collective.kind, collective.members)
        )
        total = totals[collective.kind, collective.axis, collective.inside_loop]
        total[0] += collective.passes * collective.bytes
        total[1] += sent
        total[2] += sent * collective.beside_work
    keys = ("kind", "axis", "inside_loop", "bytes", "sent", "sent_beside_work")
    return [
        dict(zip(keys, (*group, *total), strict=True)) for group, total in sorted(totals.items())
    ]


def sent_per_output(kind: str, members: int) -> float:
    """Returns the bytes that each of `members` devices in a ring sends per byte of the output."""
    share = (members - 1) / members
    if kind == "all-reduce":
        return 2 * share
    if kind == "reduce-scatter":
        return members - 1
    if kind in ("collective-permute", "collective-broadcast"):
        return 1 if members > 1 else 0
    return share


def _beside_work(listed: list["Instruction"]) -> set[str]:
    """Returns the names of a computation's collectives that overlap with work.

    That is a matmul or a loop between their -start and their -done.
    """
    under_way: set[str] = set()
    beside_work: set[str] = set()
    for instruction in listed:
        event = _event(instruction)
        if event in ("matmul", "loop"):
            beside_work |= under_way
        elif instruction.opcode.endswith("-start"):
            under_way.add(instruction.name)
        elif instruction.opcode.endswith("-done"):
            under_way -= set(instruction.operands.split())
    return beside_work


def _inside(caller: "Instruction", around: Collective) -> Collective:
    """Returns what the collectives run by `caller` inherit, given what `caller` inherits."""
    if caller.opcode == "conditional":
        return replace(around, inside_conditional=True)
    if caller.opcode != "while":
        return around
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', caller.line)
    return replace(
        around,
        inside_loop=True,
        passes=around.passes * (int(known[1]) if known else 1),
        in_rounds=around.in_rounds or not known,
    )


@dataclass(frozen=True)
class Instruction:
    """One line of the text: `%name = type opcode(operands), attributes`."""

    line: str
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str

    @property
    def called(self) -> list[str]:
        """The computations that it runs, each once: of a conditional's branches one runs."""
        one = (
            r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)"
            r"=%?([\w.-]+)"
        )
        many = r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
        names = re.findall(one, self.attributes)
        for listed in re.findall(many, self.attributes):
            names += [name.strip(" %") for name in listed.split(",")]
        return list(dict.fromkeys(names))


def computations(hlo_text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns (the instructions of each computation by its name, the name of the entry)."""
    named: dict[str, list[Instruction]] = {}
    entry = None
    current = None
    for line in hlo_text.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$", line):
            current = start[2]
            named[current] = []
            if start[1]:
                entry = current
        elif line == "}":
            current = None
        elif current and (start := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line)):
            named[current].append(_parse_instruction(start[1], line, start.end()))
    assert entry, "no ENTRY computation in the text"
    return named, entry


def _parse_instruction(name: str, line: str, at: int) -> Instruction:
    """Parses `TYPE opcode(operands), attributes`, from index `at` on.

    Quoted strings are emptied: metadata may contain anything, even names of opcodes.
    """
    rest = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line[at:])
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[end:].strip().partition("(")
    operands_end = _closing("(" + tail) - 1
    operands = tail[: operands_end - 1].replace("%", "")
    return Instruction(line.strip(), name, rest[:end], opcode, operands, tail[operands_end:])


def _closing(text: str) -> int:
    """Returns the index after the parenthesis that closes the one `text` starts with."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    raise AssertionError(f"unbalanced parentheses: {text}")


def bytes_by_dtype(type_text: str, line: str) -> dict[str, int]:
    """Counts the bytes of all arrays: {"f32": 128, "s32": 4} for `(f32[8,4]{1,0}, s32[])`."""
    totals: dict[str, int] = defaultdict(int)
    for dtype, shape in re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", type_text):
        if dtype == "pred":
            bits = 8
        elif dtype == "token":
            bits = 0
        else:
            match = re.match(r"[a-z]+(\d+)", dtype)
            assert match, f"unknown dtype {dtype}: {line}"
            bits = int(match[1])
        elements = math.prod(int(size.removeprefix("<=")) for size in shape.split(",") if size)
        totals[dtype] += -(-elements * bits // 8)
    return dict(totals)


# Which devices a collective connects


def _varying_axes(groups: Groups, mesh_axes: Mapping[str, int]) -> list[str]:
    """Returns the axes along which the members of some group differ from its first."""
    shape = tuple(mesh_axes.values())
    pairs = [(member, group[0]) for group in groups for member in group]
    members, firsts = np.array(pairs, int).reshape(-1, 2).T
    member_coordinates = np.unravel_index(members, shape)
    first_coordinates = np.unravel_index(firsts, shape)
    return [
        axis
        for axis, member, first in zip(
            mesh_axes, member_coordinates, first_coordinates, strict=True
        )
        if (member != first).any()
    ]


def _groups(kind: str, instruction: Instruction, partitions: int) -> Groups:
    """Returns the groups of partitions that exchange data.

    For a permute they are its (source, target) pairs.
    """
    is_permute = kind == "collective-permute"
    attribute = "source_target_pairs" if is_permute else "replica_groups"
    match = re.search(rf"\b{attribute}=(.*)", instruction.attributes)
    text = match[1] if match else ""
    groups = replica_groups(text, partitions) if match else None
    if groups is None or not all(0 <= member < partitions for group in groups for member in group):
        line = instruction.line
        raise AssertionError(f"cannot read {attribute} over {partitions} devices: {line}")
    if is_permute and text.startswith("{}"):
        return []  # for a permute: no pairs; for all others `{}` means all devices
    return groups


def replica_groups(text: str, partitions: int) -> Groups | None:
    """Reads the groups that `text` starts with, in any of XLA's spellings; None if there are none.

    - `{{0,1},{2,3}}`, and `{}` for one group of all
    - `[2,2]<=[4]`, and `[2,2]<=[2,2]T(1,0)`: an iota, reshaped and transposed
    - `mesh['a'=2,'b'=2] {'a'}`, also with `, device_ids=([2,2]T(1,0))` or `(0,2,1,3)`, and with a
      part of an axis: `'a':(2)4` is 4 of its indices where 2 are slower
    """
    if re.match(r"\{\}", text):
        return [list(range(partitions))]
    if match := re.match(r"\{(\{[\d,]+\}(?:,\s*\{[\d,]+\})*)\}", text):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _iota(match[2]).reshape(_numbers(match[1]))
    if match := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", text):
        return _mesh_groups(*match.groups())
    return None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(text: str) -> np.ndarray:
    """Parses `[2,4]T(1,0)`: 0 to 7, reshaped to [2, 4], transposed."""
    shape, _, order = text.rstrip(")").partition("T(")
    sizes = _numbers(shape.strip("[]"))
    array = np.arange(math.prod(sizes)).reshape(sizes)
    return array.transpose(_numbers(order)) if order else array


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> np.ndarray | None:
    """Returns [groups, members] of `mesh[AXES], device_ids=(DEVICE_IDS) {GROUPED}`.

    Each axis is cut where a part of it begins or ends. The pieces that `grouped` covers make up the
    members, the others tell groups apart.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}  # (begin, end)
    for name, slower, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", grouped):
        if name not in sizes:
            return None
        begin = int(slower or 1)
        parts[name].append((begin, begin * int(size or sizes[name])))

    shape: list[int] = []
    inside: list[bool] = []  # whether this dim of `shape` lies inside a group
    for name, size in sizes.items():
        cuts = sorted({1, size, *itertools.chain(*parts[name])})
        for low, high in itertools.pairwise(cuts):
            shape.append(high // low)
            inside.append(any(begin <= low and high <= end for begin, end in parts[name]))

    if device_ids is None:
        array = np.arange(math.prod(sizes.values()))
    elif device_ids.startswith("["):
        array = _iota(device_ids)
    else:
        array = np.array(_numbers(device_ids))
    order = sorted(range(len(shape)), key=lambda dim: inside[dim])  # stable: inside ones last
    members = math.prod(size for size, within in zip(shape, inside, strict=True) if within)
    return array.reshape(shape).transpose(order).reshape(-1, members)
