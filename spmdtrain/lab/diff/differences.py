"""Compares the code, the data and the compiled programs of two runs, from their files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdtrain.lab.diff.sides import Side
from spmdtrain.lab.replay.starts import flags_of

# Entries of the record of a start that may change numbers, with the words for them.
OF_CODE = {
    "sources": "sources of spmdtrain",
    "model_code": "code of the model",
    "seams": "parts from Python",
}
OF_PLACE = {"platform": "platform", "device_kind": "kind of device", "processes": "processes"}
OF_MEMORY = ("argument_bytes", "temp_bytes")
MOST_NAMED = 6


@dataclass(frozen=True)
class Other:
    """A difference outside the settings: what differs, and its text in A and in B."""

    what: str
    a: str
    b: str


@dataclass(frozen=True)
class DataDifference:
    """The first of `hashed` common steps that read other tokens, or None.

    `samples` are the global indices of its first and last sample in A and in B. `corpus` says
    whether the fingerprints of the data are equal (None: not recorded).
    """

    step: int | None
    hashed: int
    corpus: bool | None
    samples: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class ProgramDifference:
    """The comparison of the compiled programs. `same` is None if one was not recorded.

    `opcodes` counts the instructions that B has more (or fewer) of. `sent` has the bytes that a
    device sends in a step, by mesh axis, and `memory` those that it holds: in A and in B, where
    they differ.
    """

    same: bool | None
    opcodes: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, Sequence[float]] = field(default_factory=dict)
    memory: Mapping[str, Sequence[float]] = field(default_factory=dict)


def code_differences(a: Side, b: Side) -> list[Other]:
    """Returns the differences in sources, versions and XLA's flags."""
    differences = [
        Other(word, _text(a.start.get(name)), _text(b.start.get(name)))
        for name, word in OF_CODE.items()
    ]
    versions = [side.start.get("versions") or {} for side in (a, b)]
    names = dict.fromkeys([*versions[0], *versions[1]])
    differences += [Other(name, *(_text(side.get(name)) for side in versions)) for name in names]
    flags = [" ".join(sorted(flags_of(side.start).split())) for side in (a, b)]
    differences.append(Other("XLA_FLAGS", *flags))
    return _different(a, b, differences)


def place_differences(a: Side, b: Side) -> list[Other]:
    """Returns the differences in devices; the name of the host is not one."""
    differences = [
        Other(word, _text(a.start.get(name)), _text(b.start.get(name)))
        for name, word in OF_PLACE.items()
    ]
    return _different(a, b, differences)


def _different(a: Side, b: Side, differences: Sequence[Other]) -> list[Other]:
    if not a.start or not b.start:
        return []  # a run of an older version has no record of it
    return [difference for difference in differences if difference.a != difference.b]


def _text(value: Any) -> str:
    return "none" if value in (None, "", {}) else str(value)


def data_difference(a: Side, b: Side, steps: Sequence[int]) -> DataDifference:
    """Returns the first of the common `steps` in which the runs read other tokens."""
    known = [(s, a.written.tokens(s), b.written.tokens(s)) for s in steps]
    known = [entry for entry in known if None not in entry]
    corpus = a.corpus == b.corpus if a.corpus and b.corpus else None
    first = next((step for step, then, now in known if then != now), None)
    if first is None:
        return DataDifference(None, len(known), corpus)
    samples = [side.written.steps[first].get("samples", ()) for side in (a, b)]
    return DataDifference(first, len(known), corpus, samples)


def program_difference(a: Side, b: Side) -> ProgramDifference:
    """Compares the compiled steps: the hashes of their canonical texts, then their contents."""
    programs = [side.start.get("program") or side.compiled.get("program") for side in (a, b)]
    known = [program for program in programs if isinstance(program, dict) and program.get("hash")]
    if len(known) < len(programs):
        return ProgramDifference(None)
    if known[0]["hash"] == known[1]["hash"]:
        return ProgramDifference(True)
    then, now = (Counter(program.get("opcodes") or {}) for program in known)
    opcodes = {name: now[name] - then[name] for name in then | now if now[name] != then[name]}
    largest = sorted(opcodes.items(), key=lambda item: (-abs(item[1]), item[0]))
    return ProgramDifference(
        False,
        dict(largest),
        _two(_sent(a.compiled), _sent(b.compiled)),
        _two(_memory(a.compiled), _memory(b.compiled)),
    )


def _two(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, list[float]]:
    names = dict.fromkeys([*a, *b])
    pairs = {name: [a.get(name, 0.0), b.get(name, 0.0)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _sent(compiled: Mapping[str, Any]) -> dict[str, float]:
    sent_bytes: dict[str, float] = {}
    for operation in compiled.get("traffic") or ():
        match operation:
            case {"axis": str(axis), "sent": int() | float() as count} if count:
                sent_bytes[axis] = sent_bytes.get(axis, 0.0) + count
    return sent_bytes


def _memory(compiled: Mapping[str, Any]) -> dict[str, float]:
    memory = compiled.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    return {name: memory[name] for name in OF_MEMORY if isinstance(memory.get(name), int | float)}
