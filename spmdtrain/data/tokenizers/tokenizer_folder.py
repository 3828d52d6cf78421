"""Reads the files published with a `tokenizer.json`, which name its special tokens."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import AGAIN
from spmdtrain.config.run_files import ORIGINAL

NAME = "tokenizer.json"
OF_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
# Files of models rather than tokenizers: they name an end of text by its id.
OF_IDS = ("generation_config.json", "config.json")
WITHOUT = f"{AGAIN}, or the folder without it"


def tokenizer_file(name: str) -> Path:
    """Returns the `tokenizer.json` that `name` is the path or the folder of.

    An imported run is such a folder too. Raises DataError if there is none.
    """
    path = Path(os.path.expanduser(name))
    for inside in (path / NAME, path / ORIGINAL / NAME):
        if os.path.isfile(inside):  # unlike Path.is_file, accepts a name that is too long
            return inside
    if os.path.isfile(path):
        return path
    if name and os.path.isdir(path):
        names = sorted(file.name for file in path.glob("*token*"))
        raise DataError(
            f"the folder {name} holds no {NAME}",
            found=", ".join(names[:5]),
            fix="a tokenizer.json, as save_pretrained of transformers writes it",
        )
    if name and os.path.exists(path):  # e.g. a pipe, which would block
        raise DataError(f"the tokenizer {name} is not a file", fix="a tokenizer.json")
    raise DataError(
        f"no tokenizer {name!r:.200}: neither a known name nor a file (names of the Hugging Face "
        "hub are not downloaded)",
        fix="bytes, characters or a tokenizer.json",
    )


def specials_named(folder: Path) -> list[str]:
    """Returns the tokens that the files next to a `tokenizer.json` call special.

    Raises DataError if one of them is damaged.
    """
    tokens = []
    for content in map(_read, _existing(folder, OF_TOKENS)):
        for key, value in content.items():
            if key.endswith("_token"):
                tokens.append(_text_of(value))
            elif key == "additional_special_tokens" and isinstance(value, list):
                tokens += map(_text_of, value)
        described = content.get("added_tokens_decoder")
        if isinstance(described, dict):
            for token in described.values():
                if isinstance(token, dict) and token.get("special") is True:
                    tokens.append(_text_of(token))
    return list(dict.fromkeys(token for token in tokens if token))


def ends_named(folder: Path) -> Iterator[str | int]:
    """Yields the ends of text named by the files next to a `tokenizer.json`: tokens, then ids.

    Raises DataError if one of them is damaged, or names an end that is no id of a token.
    """
    for content in map(_read, _existing(folder, OF_TOKENS)):
        token = _text_of(content.get("eos_token"))
        if token:
            yield token
    for path in _existing(folder, OF_IDS):
        ids = _read(path).get("eos_token_id")
        listed: list[Any] = ids if isinstance(ids, list) else [ids] * (ids is not None)
        if not all(type(each) is int for each in listed):
            raise DataError(
                f"eos_token_id of {path} is no id of a token",
                found=f"{ids!r:.80}",
                fix="an id, a list of ids, or null",
            )
        yield from listed


def adds_begin(folder: Path) -> bool | None:
    """Returns the `add_bos_token` of a `tokenizer_config.json`; None if it does not say.

    Raises DataError if the file is damaged.
    """
    value = read_config(folder / OF_TOKENS[0]).get("add_bos_token")
    return value if isinstance(value, bool) else None


def named_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens that the files next to a `tokenizer.json` name, by their names.

    These are `bos_token`, `eos_token` etc. Raises DataError if one of the files is damaged.
    """
    token_of: dict[str, str] = {}
    for content in map(_read, _existing(folder, reversed(OF_TOKENS))):
        for key, value in content.items():
            token = _text_of(value)
            if key.endswith("_token") and token is not None:
                token_of[key] = token
    return token_of


def read_config(path: Path) -> dict[str, Any]:
    """Returns the object in a file of JSON; an empty one if there is no file.

    Raises DataError if it is not JSON, or no object.
    """
    return _read(path) if path.is_file() else {}


def _existing(folder: Path, names: Iterable[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}"
        raise DataError(what, fix="a file that you may read") from None
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deep
        raise DataError(f"{path} is not JSON: {error}", fix=WITHOUT) from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not an object of JSON", found=f"{content!r:.40}", fix=WITHOUT)
    return content


def _text_of(token: Any) -> str | None:
    """Returns a token's text; newer files write the token as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
