"""Suggests names in place of a mistyped one."""

import difflib
import re
from collections.abc import Iterable

# Names in other trainers (without the characters that do not count) -> ours.
USUAL = {
    "dp": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "lr": "learning_rate",
    "wd": "weight_decay",
    "batchsize": "global_batch",
    "seqlen": "sequence_length",
    "maxsteps": "steps",
    "iters": "steps",
    "maxiters": "steps",
    "warmupsteps": "warmup",
    "gradclip": "clip",
    "maxgradnorm": "clip",
    "hiddensize": "embed",
    "dmodel": "embed",
    "nlayers": "layers",
    "numlayers": "layers",
    "nheads": "heads",
    "numheads": "heads",
    "numattentionheads": "heads",
    "vocabsize": "vocab",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "evaluate": "eval",
    "generate": "sample",
    "resume": "train",
    "run": "train",
    "maxtokens": "length",
    "maxnewtokens": "length",
}


def usual(word: str) -> str:
    """Returns our name for what other trainers call `word`, or the word itself."""
    return USUAL.get(_plain(word[:200]), word)


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Returns the known name nearest to `word`; "" if none resembles it.

    Capitals, `-`, `_`, `.` and spaces do not count: 1F1B is 1f1b, and best-fit is best_fit.
    """
    return next(iter(near(word, known, 1, alike)), "")


def near(word: str, known: Iterable[str], limit: int, alike: float = 0.6) -> list[str]:
    """Returns up to `limit` known names that resemble `word`, the nearest first."""
    plain = {}
    for name in known:
        plain.setdefault(_plain(name), name)
    word = word if _plain(word[:200]) in plain else usual(word)
    matches = difflib.get_close_matches(_plain(word[:200]), plain, limit, alike)
    return [plain[name] for name in matches]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ", did you mean NAME?" to append to an error message, or ""."""
    name = nearest(word, known)
    return f", did you mean {name}?" if name else ""


def _plain(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name).casefold() or name
