"""Lists the kernels that a compiled step launches on a GPU, with the bytes that each moves.

Each array that a kernel reads or writes counts once: a slice with its own bytes, an array that is
updated in place with those of the update. An array that one kernel begins and another one fills
counts in the first.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spmdtrain.compiled import hlo
from spmdtrain.compiled.hlo import Instruction

TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Opcodes that launch no kernel.
FREE = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "optimization-barrier"),
}
CALLS = {"call", "conditional", "async-start"}
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATE = "dynamic-update-slice"
# Opcodes of a fusion that only moves data, beside the scalars of its indices.
MOVES = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast"),
    *("copy", "transpose", "reshape", "broadcast", "dynamic-slice", UPDATE, "slice"),
    *("concatenate", "pad"),
}
FLOAT = re.compile(r"b?f\d")
MOSAIC = 'custom_call_target="mosaic_gpu'
ALIASES = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
ALIASED_OPERAND = re.compile(r"\((\d+), \{\}\)")


@dataclass(frozen=True)
class Kernel:
    """One kernel of the text; a loop launches it `launches` times."""

    name: str
    kind: str  # its opcode, or the target of a custom call
    launches: int
    read: float  # bytes of one launch
    written: float
    only_moves: bool  # it computes nothing
    only_converts: bool  # it turns floats of one width into another, and computes nothing else

    @property
    def moved(self) -> float:
        """The bytes that all launches read and write."""
        return self.launches * (self.read + self.written)


def kernels(hlo_text: str) -> list[Kernel]:
    """Returns the kernels of a step, in the order of the text.

    A loop of unknown length counts once.
    """
    named, entry = hlo.computations(hlo_text)

    def of(name: str, launches: int) -> Iterator[Kernel]:
        listed = _with_results(named[name])
        around = _by_name(listed)
        for instruction in listed:
            opcode = instruction.opcode
            if opcode == "while":
                trips = TRIPS.search(instruction.line)
                for called in instruction.called:
                    yield from of(called, launches * (int(trips[1]) if trips else 1))
            elif opcode in CALLS:
                for called in instruction.called:
                    yield from of(called, launches)
            elif opcode not in FREE and not opcode.endswith("-done"):
                yield _kernel(instruction, around, named, launches)

    return list(of(entry, 1))


def _with_results(listed: Sequence[Instruction]) -> list[Instruction]:
    """Returns the instructions, each -start with the type of its -done.

    A -start's own type holds its operands as well.
    """
    results = {_operands(done)[0]: done.type for done in listed if done.opcode.endswith("-done")}
    return [replace(start, type=results.get(start.name, start.type)) for start in listed]


def _by_name(listed: Sequence[Instruction]) -> dict[str, Instruction]:
    return {instruction.name: instruction for instruction in listed}


def _kernel(
    of: Instruction,
    around: Mapping[str, Instruction],
    named: Mapping[str, Sequence[Instruction]],
    launches: int,
) -> Kernel:
    inner = named[of.called[0]] if of.opcode.startswith("fusion") else [of]
    if of.opcode.startswith("fusion"):
        read, written = _moved_by_fusion(inner)
    else:
        read, written = _moved(of, around)
    arrays = [instruction for instruction in inner if not _is_scalar(instruction)]
    kinds = {instruction.opcode for instruction in arrays}
    by_name = {**around, **_by_name(inner)}
    conversions = [array for array in arrays if array.opcode == "convert"]
    of_floats = all(_is_of_floats(conversion, by_name) for conversion in conversions)
    converts = bool(conversions) and kinds <= MOVES | {"convert"} and of_floats
    named_kind = re.search(r'custom_call_target="([^"]+)"', of.line)
    kind = named_kind[1] if named_kind else of.opcode.removesuffix("-start")
    return Kernel(of.name, kind, launches, read, written, kinds <= MOVES, converts)


def _moved(of: Instruction, around: Mapping[str, Instruction]) -> tuple[float, float]:
    """Returns the bytes that an instruction other than a fusion reads and writes."""
    operands = [around[name] for name in _operands(of) if name in around]
    if of.opcode in SLICES:
        return _size(of), _size(of)
    if of.opcode == UPDATE:
        return _size(operands[1]), _size(operands[1])
    filled = sum(_size(operands[int(number)]) for number in _filled_operands(of))
    return sum(map(_size, operands)) - filled, _size(of) - filled


def _filled_operands(of: Instruction) -> list[str]:
    """Returns the numbers of the operands that a kernel on Mosaic GPU fills what is left of.

    Ours take an array that is a result, too, for nothing else.
    """
    if MOSAIC not in of.line:
        return []
    aliases = ALIASES.search(of.line)
    return ALIASED_OPERAND.findall(aliases[1]) if aliases else []


def _moved_by_fusion(inner: Sequence[Instruction]) -> tuple[float, float]:
    """Returns the bytes that a fusion of these instructions reads and writes."""
    by_name = _by_name(inner)
    users: dict[str, list[Instruction]] = defaultdict(list)
    for user in inner:
        for name in _operands(user):
            users[name].append(user)

    def read(of: Instruction) -> float:
        total = 0.0
        for user in users[of.name]:
            if user.opcode in SLICES:
                total += _size(user)
            elif user.opcode == "bitcast":
                total += read(user)
            elif user.opcode != UPDATE or _operands(user)[0] != of.name:
                return _size(of)
        return min(total, _size(of))

    def written(of: Instruction) -> float:
        if of.opcode == "tuple":
            return sum(written(by_name[name]) for name in _operands(of))
        if of.opcode == "bitcast":
            return written(by_name[_operands(of)[0]])
        return _size(by_name[_operands(of)[1]] if of.opcode == UPDATE else of)

    parameters = [instruction for instruction in inner if instruction.opcode == "parameter"]
    return sum(map(read, parameters)), written(inner[-1])


def _operands(of: Instruction) -> list[str]:
    """Returns the names of the operands; a type may stand before each, with commas of its own."""
    plain = re.sub(r"/\*.*?\*/", "", of.operands)
    parts = re.split(r", (?![^\[\{]*[\]\}])", plain)
    return [part.split()[-1] for part in parts if part]


def _size(of: Instruction) -> int:
    return sum(hlo.bytes_by_dtype(of.type, of.line).values())


def _is_of_floats(conversion: Instruction, by_name: Mapping[str, Instruction]) -> bool:
    sides = conversion, by_name[_operands(conversion)[0]]
    return all(FLOAT.match(side.type) for side in sides)


def _is_scalar(of: Instruction) -> bool:
    return "[]" in of.type
