"""Finds the tokens around each document: the *begin of text* before, the *end of text* after it."""

import json

from spmdtrain.config.errors import DataError
from spmdtrain.data.tokenizers.tokenizer import (
    END_BYTE,
    END_CHARACTER,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
)

# The usual names of the end of text in published Hugging Face tokenizers.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end|>")


def end_of_text(tokenizer: Tokenizer, requested: str, name: str) -> tuple[Tokenizer, int | None]:
    """Returns the tokenizer with an end of text, and its id; None if `requested` is "none".

    `requested` may be a token of the tokenizer or "auto". "auto" is the byte 0xFF; or the character
    U+10FFFF, which is added to the alphabet; or, for a `tokenizer.json`, the token that the files
    next to it name (`ends_named`), or else the special token with a known name.

    `name` is the tokenizer's, as for `open_tokenizer`. Raises DataError if there is no such token.
    """
    if requested == "none":
        return tokenizer, None
    if requested != "auto":
        return _with_named(tokenizer, requested, name, "end")
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer, END_BYTE
    if isinstance(tokenizer, CharacterTokenizer):
        if END_CHARACTER in tokenizer.alphabet:
            raise DataError(
                "the texts hold U+10FFFF, with which the tokenizer `characters` ends one",
                fix="--end-of-text none, or --tokenizer bytes",
            )
        extended = CharacterTokenizer(tokenizer.alphabet + END_CHARACTER)
        return extended, extended.id_of(END_CHARACTER)
    from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
    from spmdtrain.data.tokenizers.tokenizer_folder import ends_named, tokenizer_file

    assert isinstance(tokenizer, HuggingFaceTokenizer), "the only other kind"
    for named in ends_named(tokenizer_file(name).parent):
        token = named if isinstance(named, str) else tokenizer.token_of(named)
        i = None if token is None else tokenizer.id_of(token)
        if token is not None and i is not None:
            return tokenizer.with_control([token]), i
    for token in END_NAMES:
        if token in tokenizer.control:
            return tokenizer, tokenizer.control[token]
    raise DataError(
        f"no token of {name} is known to end a text",
        found=", ".join(list(tokenizer.control)[:5]) or "no special tokens",
        fix="--end-of-text TOKEN, or --end-of-text none",
    )


def begin_of_text(tokenizer: Tokenizer, requested: str, name: str) -> tuple[Tokenizer, int | None]:
    """Returns the tokenizer with a begin of text, and its id, which is None if there is none.

    `requested` is "none", a token of the tokenizer, or "auto". "auto" is the token that the
    post-processor of a `tokenizer.json` puts before a text, as transformers does, unless the
    `add_bos_token` in the file next to it disagrees. Bytes and characters have none.

    `name` is the tokenizer's, as for `open_tokenizer`. Raises DataError if there is no such token,
    or if the files disagree.
    """
    if requested == "none":
        return tokenizer, None
    if requested != "auto":
        return _with_named(tokenizer, requested, name, "begin")
    if isinstance(tokenizer, ByteTokenizer | CharacterTokenizer):
        return tokenizer, None
    from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
    from spmdtrain.data.tokenizers.tokenizer_folder import adds_begin, tokenizer_file

    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer, None
    folder = tokenizer_file(name).parent
    adds, ids = adds_begin(folder), tokenizer.begin_of_text()
    # If the two disagree, versions of transformers disagree too.
    if len(ids) > 1 or adds not in (None, bool(ids)):
        before = " ".join(tokenizer.token_of(i) or str(i) for i in ids) or "nothing"
        setting = "" if adds is None else f", and add_bos_token={json.dumps(adds)}"
        raise DataError(
            f"the files of {name} do not say which token begins a text",
            found=f"a post-processor that puts {before} before it{setting}",
            fix="--begin-of-text TOKEN or none (for a stream: data.begin_of_text)",
        )
    if not ids:
        return tokenizer, None
    return tokenizer.with_control(filter(None, [tokenizer.token_of(ids[0])])), ids[0]


def _with_named(tokenizer: Tokenizer, token: str, name: str, does: str) -> tuple[Tokenizer, int]:
    """Returns the tokenizer with a token that a person named, and its id.

    `does` is "end" or "begin", for the message. Raises DataError if there is no such token.
    """
    i = tokenizer.id_of(token)
    if i is None:
        raise DataError(
            f"the tokenizer {name} has no token {token!r} to {does} a text with",
            fix=f"a token of its own, or none, for --{does}-of-text",
        )
    return _with_control(tokenizer, token), i


def _with_control(tokenizer: Tokenizer, token: str) -> Tokenizer:
    """Returns the tokenizer with a token that text cannot produce, if that can be prevented."""
    if isinstance(tokenizer, ByteTokenizer | CharacterTokenizer):
        return tokenizer
    from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.with_control([token])
    return tokenizer
