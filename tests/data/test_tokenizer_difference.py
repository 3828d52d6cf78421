"""Two tokenizers are the same if ids stand for the same texts, however their files were saved."""

import copy
import hashlib
import json
import re

import numpy as np
import pytest

from spmdtrain.data.tokenizers.difference import difference, named
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer, open_tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEXT = "hello there, to be or not to be"


def spec_of(content: dict, path: str = "other.json") -> dict:
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"kind": "huggingface", "path": path, "sha256": digest, "json": text}


@pytest.fixture
def content(tokenizer_json):
    return json.loads(tokenizer_json.read_text())


def saved_with_padding(content):
    content["truncation"] = None
    content["padding"] = {
        **{"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<|end|>"},
    }


def merges_in_words(content):
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]


def chance(content):
    content["model"]["dropout"] = 0.5


def another_token(content):
    number = 1 + max(content["model"]["vocab"].values())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": number, "content": "<|tool|>", **flags})


SAME = [saved_with_padding, merges_in_words, chance, another_token]


@pytest.mark.parametrize("change", SAME)
def test_files_that_make_the_same_ids_are_the_same(change, content):
    other = copy.deepcopy(content)
    change(other)
    ours, theirs = spec_of(content), spec_of(other)
    assert ours["sha256"] != theirs["sha256"]
    assert difference(ours, theirs) == difference(theirs, ours) == ""


def swapped_ids(content):
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def swapped_merges(content):
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def lower_case(content):
    content["normalizer"] = {"type": "Lowercase"}


def apart_at_spaces(content):
    content["pre_tokenizer"] = {"type": "WhitespaceSplit"}


OTHER = {
    swapped_ids: r"id \d+ is '[ab]', not '[ab]'",
    swapped_merges: "another merges",
    lower_case: "another normalizer",
    apart_at_spaces: "another pre_tokenizer",
}


@pytest.mark.parametrize("change", OTHER)
def test_a_difference_is_said(change, content):
    other = copy.deepcopy(content)
    change(other)
    for one, another in ((content, other), (other, content)):
        assert re.fullmatch(OTHER[change], difference(spec_of(one), spec_of(another)))


def test_scores_of_unigrams_are_compared():
    pieces = [("a", 0.0), ("b", -1.0), ("ab", -1.5)]
    one, other = (
        json.loads(tokenizers.Tokenizer(tokenizers.models.Unigram(vocab)).to_str())
        for vocab in (pieces, [*pieces[:2], ("ab", -2.5)])
    )
    assert difference(spec_of(one), spec_of(one | {"version": "1.0"})) == ""
    assert difference(spec_of(one), spec_of(other)) == "another scores"


def test_kinds_and_alphabets_are_compared_and_what_is_unknown_is_not(content):
    letters = [CharacterTokenizer(each).spec() for each in ("abc", "abd")]
    assert difference(*letters) == "other characters"
    assert difference(ByteTokenizer().spec(), spec_of(content)) == "another kind of tokenizer"
    assert difference(ByteTokenizer().spec(), ByteTokenizer().spec()) == ""
    assert difference(None, spec_of(content)) == difference(spec_of(content), None) == ""
    assert named(spec_of(content, "a.json")).startswith("a.json (")
    assert named(ByteTokenizer().spec()) == "bytes"


@pytest.mark.parametrize("dropout", [0.1, 1.0])
def test_a_tokenizer_leaves_nothing_to_chance(dropout, content, tokenizer_json):
    plain = open_tokenizer(str(tokenizer_json))
    content["model"]["dropout"] = dropout
    tokenizer_json.write_text(json.dumps(content))
    drawing = open_tokenizer(str(tokenizer_json))
    for tokenizer in (drawing, drawing.with_control(["hello"])):
        for _ in range(20):
            assert np.array_equal(tokenizer.encode(TEXT), plain.encode(TEXT))
        texts = [TEXT, "<|end|>"]
        for one, other in zip(
            tokenizer.encode_batch(texts), plain.encode_batch(texts), strict=True
        ):
            assert np.array_equal(one, other)
        parts = ["hello <|end|>", "<|end|>", TEXT]
        assert np.array_equal(tokenizer.encode_parts(parts).ids, plain.encode_parts(parts).ids)
