"""The notes made on each document while it is encoded, and the lines that report their counts."""

from collections.abc import Mapping

from spmdtrain.data.chats.tool_calls import PARSE_ARGUMENTS

# Bits of a note.
SPELLS = 1  # it spells a special token or a marker of the template
HOLDS_END = 2  # it also contains the token that ends it
HAS_GAPS = 4  # the template has left out a part of a message
NEVER_ENDS = 8  # a learned answer has an end that is not learned
QUOTES = 16  # the template writes a tool call's arguments, a text, in quotes
REPEATS = 32  # the answer to the prompt, a text, begins with the prompt

COUNTED = {
    "spelling": SPELLS,
    "holding_end": HOLDS_END,
    "with_gaps": HAS_GAPS,
    "never_ending": NEVER_ENDS,
    "quoting": QUOTES,
    "repeating": REPEATS,
}

# The verb for one conversation and for several, and what follows it.
OF_CONVERSATIONS = {
    "with_gaps": ("has", "have", "a message of which the template leaves out a part"),
    "never_ending": (
        "has",
        "have",
        "an answer whose end is not learned, so a model does not learn to stop there: the template "
        "must write what closes an answer, and inside {% generation %} where it has that",
    ),
    "quoting": (
        "has",
        "have",
        f"arguments of a tool call that are a text, which the template puts in quotes "
        f"({PARSE_ARGUMENTS} reads them as the object)",
    ),
}

# In a pair the common beginning is known to be the prompt, as both answers have it.
REPEATED = "the prompt again at the beginning of what answers it"
OF_PAIR, OF_ONE = "; it is written once", "; it is learned as part of the answer"


def lines_of_notes(counts: Mapping[str, int], pairs: bool) -> list[str]:
    """Returns a line for each kind of note, with the number of conversations that have it.

    With `pairs` each holds two answers.
    """
    repeated = ("has", "have", REPEATED + (OF_PAIR if pairs else OF_ONE))
    lines = []
    for name, (one, several, what) in (OF_CONVERSATIONS | {"repeating": repeated}).items():
        count = counts[name]
        if count:
            verb = f"1 conversation {one}" if count == 1 else f"{count:,} conversations {several}"
            lines.append(f"{verb} {what}")
    return lines
