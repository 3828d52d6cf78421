"""Describes how two tokenizers differ: weights and data must agree on the text of each id.

Different tokenizers have different hashes, but so have a file and its copy that another version of
a package has saved. So two files with different hashes are compared by how they cut a text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import AGAIN
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer, tokenizer_fingerprint
from spmdtrain.data.tokenizers.tokenizer_folder import NAME

Spec = Mapping[str, Any]
SHOWN = 8  # hex digits of a hash
# The parts of a file that decide which ids a text has, besides its table of ids.
RULES = ("normalizer", "pre_tokenizer")
# Parts of its model that are no rule: the table of ids, and chance, which is switched off.
NO_RULE = ("vocab", "dropout")


def difference(ours: Spec | None, theirs: Spec | None) -> str:
    """Returns how the tokenizer `theirs` differs from `ours`; "" if ids mean the same.

    They also do if one is unknown, or if one only has additional tokens.
    """
    if ours is None or theirs is None:
        return ""
    if tokenizer_fingerprint(dict(ours)) == tokenizer_fingerprint(dict(theirs)):
        return ""
    if "json" not in ours or "json" not in theirs:
        return "another kind of tokenizer" if ours["kind"] != theirs["kind"] else "other characters"
    return _difference_of_files(_content(ours), _content(theirs))


def named(spec: Spec) -> str:
    """Describes a tokenizer: its file and the beginning of its hash, or its kind."""
    if "json" not in spec:
        return str(spec["kind"])
    return f"{spec['path']} ({spec['sha256'][:SHOWN]})"


def spec_in(folder: Path) -> Spec | None:
    """Returns the spec of the `tokenizer.json` of a published model; None if there is none."""
    return open_tokenizer(str(folder)).spec() if (folder / NAME).is_file() else None


def _content(spec: Spec) -> dict[str, Any]:
    """Returns the content of a file as the installed package `tokenizers` writes it."""
    import tokenizers

    try:
        return json.loads(tokenizers.Tokenizer.from_str(spec["json"]).to_str())
    except ValueError as error:
        what = f"{spec['path']} is not a Hugging Face tokenizer.json: {error}"
        raise DataError(what, fix=AGAIN) from None


def _difference_of_files(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    our_tokens, their_tokens = _token_of_id(ours), _token_of_id(theirs)
    for number in sorted(our_tokens.keys() & their_tokens.keys()):
        if our_tokens[number] != their_tokens[number]:
            return f"id {number} is {their_tokens[number]!r:.60}, not {our_tokens[number]!r:.60}"
    our_rules, their_rules = _rules(ours), _rules(theirs)
    names = dict.fromkeys([*our_rules, *their_rules])
    other = [name for name in names if our_rules.get(name) != their_rules.get(name)]
    return f"another {' and '.join(other)}" if other else ""


def _token_of_id(content: Mapping[str, Any]) -> dict[int, str]:
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # a unigram model, whose tokens have scores
        tokens = {number: token for number, (token, _) in enumerate(vocab)}
    else:
        tokens = {number: token for token, number in vocab.items()}
    return tokens | {token["id"]: token["content"] for token in content["added_tokens"]}


def _rules(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rules that cut a text, and those of the model, without defaults."""
    rules = {name: content.get(name) for name in RULES}
    model = content["model"]
    rules |= {name: value for name, value in model.items() if name not in NO_RULE and value}
    if isinstance(model["vocab"], list):
        rules["scores"] = model["vocab"]
    return rules
