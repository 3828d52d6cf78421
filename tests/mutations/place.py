"""Finds the place of a breakage by its tokens: how a line is broken, indented or commented on does
not count, nor does a comma before a closing bracket.
"""

import re

# A comment, a string, a word or number, or a sign.
TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)"
    r"|[rbfuRBFU]{0,2}(?:\"\"\"[\s\S]*?\"\"\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|\w+|[^\w\s]"
)


def tokens_of(text: str) -> list[re.Match]:
    found = [token for token in TOKEN.finditer(text) if not token["comment"]]
    closed = [*(token[0] in ")]}" for token in found[1:]), True]  # the end of a quote, too
    pairs = zip(found, closed, strict=True)
    return [token for token, before_end in pairs if not (before_end and token[0] == ",")]


def places_of(source: str, quoted: str) -> list[tuple[int, int]]:
    """Where `source` reads as `quoted` does: (start, end) of each place."""
    tokens, wanted = tokens_of(source), [token[0] for token in tokens_of(quoted)]
    words = [token[0] for token in tokens]
    starts = [at for at in range(len(words)) if words[at : at + len(wanted)] == wanted]
    return [(tokens[at].start(), tokens[at + len(wanted) - 1].end()) for at in starts]


def broken(source: str, before: str, after: str) -> str:
    """`source` with `after` at the one place that reads as `before`."""
    (place,) = places_of(source, before)
    start, end = place
    line = source[source.rfind("\n", 0, start) + 1 : start]
    if before.rstrip().endswith(","):  # it is not of the place, and stays
        after = after.rstrip().removesuffix(",")
    first, *rest = after.strip("\n").split("\n")
    shift = _indent(line) - _indent(first)
    moved = [" " * max(_indent(each) + shift, 0) + each.lstrip() for each in rest]
    return source[:start] + "\n".join([first.lstrip(), *moved]) + source[end:]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
