"""Holds the text that a template renders from a conversation, and checks the names of roles."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.tokenizers.tokenizer import Tokenizer

# The parts of templates that look like special tokens.
MARKER = re.compile(r"<[|｜][^<>]*[|｜]>|</?[A-Za-z_]+>|\[/?[A-Z_]+\]")


class Written(NamedTuple):
    """A conversation as text."""

    parts: list[str]  # the template's text and others', alternately, for `encode_parts`
    learned: np.ndarray  # bool [characters], True in answers that are learned
    has_gaps: bool = False  # the template has left out a part of a message
    never_ending: tuple[int, ...] = ()  # the learned messages whose end is not learned
    quotes_arguments: bool = False  # it writes arguments that are a text in quotes


class Frame(NamedTuple):
    """The texts of a template around an answer to a question."""

    opening: str  # from the end of the question to where a model writes
    lead: str  # what a model writes first
    closing: str  # what it writes last


def check_role(role: str, markers: Sequence[str], tokenizer: Tokenizer, where: str) -> None:
    """Raises DataError if a role could be taken for a part of the template."""
    spells = tokenizer.spells_special(role) or any(marker in role for marker in markers)
    if spells or not role.isprintable():
        raise DataError(f"{where} has a message whose role is not a name", found=f"{role!r:.60}")
