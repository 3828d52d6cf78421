"""Small tokenizers, written by hand so that they are the same everywhere, and what they mean.

`bytelevel` is that of GPT-2: every text comes back. `unmarked` is the same, but does not say that
its special tokens are special. `metaspace` is that of Llama 2: bytes for what
it does not know, and a space put before each text.
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTELEVEL_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
METASPACE_SPECIALS = ("<s>", "</s>")
ENDS = {"bytelevel": "<|endoftext|>", "metaspace": "</s>", "unmarked": "<|endoftext|>"}
PAIRS = ("l l", "h e", "t h", "th e", "he ll", "hell o", "Ġ t", "a a", "aa aa", "1 2", "n o")


@cache
def content_of(name: str) -> str:
    """Return the `tokenizer.json`."""
    made = _metaspace() if name == "metaspace" else _bytelevel(is_marked=name == "bytelevel")
    return made.to_str(pretty=True)


def special_ids(name: str) -> list[int]:
    """Return the ids that stand for no text."""
    made = opened(content_of(name))
    return list(made.get_added_tokens_decoder())


def write(name: str, path: Path) -> None:
    path.write_text(content_of(name), encoding="utf-8")


def _with_pairs(pieces: list[str], pairs: list[str]) -> tuple[dict[str, int], list]:
    merges = [tuple(pair.split(" ")) for pair in pairs]
    merged = [first + second for first, second in merges]
    return {piece: i for i, piece in enumerate([*pieces, *merged])}, merges


def _bytelevel(*, is_marked: bool) -> Tokenizer:
    vocab, merges = _with_pairs(sorted(pre_tokenizers.ByteLevel.alphabet()), list(PAIRS))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(each, special=is_marked) for each in BYTELEVEL_SPECIALS])
    return tokenizer


def _metaspace() -> Tokenizer:
    letters = [chr(point) for point in range(33, 127)]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pairs = [pair.replace("Ġ", "▁") for pair in PAIRS]
    vocab, merges = _with_pairs(["<unk>", *METASPACE_SPECIALS, *bytes_, "▁", *letters], pairs)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken(each) for each in METASPACE_SPECIALS])
    return tokenizer


@cache
def opened(content: str) -> Tokenizer:
    """Return the package's own tokenizer of a `tokenizer.json`."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@cache
def taking_text_for_text(name: str) -> Tokenizer:
    """Return the package's own tokenizer, to which a special token that a text spells is text."""
    marked = "bytelevel" if name == "unmarked" else name  # it heeds the mark alone
    tokenizer = Tokenizer.from_str(content_of(marked))
    tokenizer.encode_special_tokens = True
    return tokenizer


@cache
def bytes_of_pieces() -> list[bytes]:
    """Return the bytes that each id of `bytelevel` stands for, by the table of GPT-2."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    byte_of = {chr(byte): byte for byte in printed}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
    described = json.loads(content_of("bytelevel"))
    pieces = {i: piece for piece, i in described["model"]["vocab"].items()}
    meant = [bytes(byte_of[letter] for letter in pieces[i]) for i in range(len(pieces))]
    return meant + [special.encode() for special in BYTELEVEL_SPECIALS]
