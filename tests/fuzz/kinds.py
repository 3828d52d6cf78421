"""What a finding is called, so that the same fault has one name in every draw."""

import re
import traceback
from pathlib import Path

import spmdtrain

PACKAGE = Path(spmdtrain.__file__).parent
LAST_WORDS = re.compile(r"Check failed: .*|Fatal Python error: .*|MemoryError.*|Invalid .*")


def kind_of_end(died: str, stderr: str) -> str:
    """A process that ended, by its signal and its last words."""
    words = LAST_WORDS.search(stderr)
    return f"the process ended: {died}" + (f", {without_numbers(words[0])}" if words else "")


def kind_of(error: Exception) -> str:
    """An exception by its type, the innermost of our functions that it came through, and its
    words.
    """
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "nowhere of ours"
    return f"{type(error).__name__} in {where}: {without_numbers(str(error))}"


def without_numbers(text: str) -> str:
    """A message without what differs from draw to draw."""
    first = " ".join(text.split())
    first = re.sub(r"'[^']*'|/\S+", "_", first)
    return re.sub(r"\d[\d.e+-]*", "N", first)[:90]
