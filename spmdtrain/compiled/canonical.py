"""Strips a compiled program of all that changes from process to process, and hashes it.

XLA's text names every instruction, and the line of source that it comes from. Names depend on
earlier compilations, and paths on the location of the checkout. Without both, two compiles of
one program give the same text, and a different instruction, operand, layout or constant gives a
different one.
"""

import hashlib
import re
from collections import Counter
from typing import Any

QUOTED = r'"(?:[^"\\]|\\.)*"'
BRACED = rf"\{{(?:[^{{}}\"]|{QUOTED}|\{{(?:[^{{}}\"]|{QUOTED})*\}})*\}}"
DROPPED = re.compile(rf",? (?:metadata={BRACED}|channel_id=\d+)")
NAME = re.compile(rf"{QUOTED}|%[\w.-]+")
OPCODE = re.compile(r'^ +(?:ROOT )?%\d+ = [^"]*? ([a-z][a-z0-9-]*)\(', re.MULTILINE)
HEADER = re.compile(r"(ENTRY )?(%?[\w.-]+) (?:\(.*)?\{$")


def program(hlo_text: str) -> dict[str, Any] | None:
    """Returns the identity of a compiled program: its hash, and how often each opcode occurs.

    None if the text holds no instruction.
    """
    text = canonical(hlo_text)
    opcodes = Counter(OPCODE.findall(text))
    return {"hash": _hash(text), "opcodes": dict(sorted(opcodes.items()))} if opcodes else None


def program_hash(hlo_text: str) -> str:
    """Returns a hash of the canonical text of a module: 16 hexadecimal digits."""
    return _hash(canonical(hlo_text))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical(hlo_text: str) -> str:
    """Returns the text of a module without metadata, with names numbered in the order of first use.

    Tables of files and stack frames are left out, and so are the numbers of channels.
    """
    numbers: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        name = match[0]
        if name.startswith('"'):  # a string may hold anything, even a percent sign
            return name
        return numbers.setdefault(name, f"%{len(numbers)}")

    lines = hlo_text.splitlines()
    output = [re.sub(r"^HloModule [^,\s]+", "HloModule", line) for line in lines[:1]]
    inside = False
    for line in lines[1:]:
        if start := HEADER.match(line):
            inside = True
            output.append(NAME.sub(renamed, f"{start[1] or ''}{start[2]} {{"))
        elif line == "}":
            inside = False
            output.append(line)
        elif inside:
            output.append(NAME.sub(renamed, DROPPED.sub("", line)))
    return "\n".join(output)
