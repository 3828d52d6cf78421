import json
import os
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.config.errors import DataError
from spmdtrain.data.tokenizers.text_ends import begin_of_text, end_of_text
from spmdtrain.data.tokenizers.tokenizer import (
    from_spec,
    open_tokenizer,
    tokenizer_fingerprint,
)

TEXTS = ["hello wörld\r\n", "", "a 🙂 b\t\x00", "hello there, hello again"]


@pytest.mark.parametrize("kind", ["bytes", "characters", "huggingface"])
def test_every_tokenizer_round_trips_text_also_after_its_spec_went_through_json(
    kind, tokenizer_json
):
    tokenizer = open_tokenizer(str(tokenizer_json) if kind == "huggingface" else kind, TEXTS)
    spec = json.loads(json.dumps(tokenizer.spec()))
    tokenizer_json.unlink()  # a moved file does not matter
    for each in tokenizer, from_spec(spec):
        assert each.size == tokenizer.size
        for text in TEXTS:
            ids = each.encode(text)
            assert ids.dtype == np.int32 and (ids < each.size).all()
            assert each.decode(ids) == text
        # A padded vocabulary may be sampled.
        assert isinstance(each.decode([0, each.size, 10**6, -1]), str)


@given(st.text())
def test_bytes_round_trip_every_text(text):
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_cut_in_the_middle_of_a_character_decode_with_a_replacement():
    assert open_tokenizer("bytes").decode([0x61, 0xC3]) == "a\ufffd"
    assert open_tokenizer("bytes").decode([0x61, 300]) == "a\ufffd"


def test_a_prompt_that_is_not_utf8_keeps_its_bytes():
    """Python hands bytes of the command line that are not UTF-8 over as lone surrogates."""
    assert open_tokenizer("bytes").encode("a\udcff").tolist() == [0x61, 0xFF]
    with pytest.raises(DataError, match="half a surrogate pair at position 1"):
        open_tokenizer("bytes").encode("a\ud800")


def test_an_unknown_character_is_refused_by_name():
    tokenizer = open_tokenizer("characters", ["abc", "cd"])
    assert tokenizer.spec()["characters"] == "abcd"
    with pytest.raises(DataError, match=r"'é' \(U\+00E9\) at position 2 "):
        tokenizer.encode("abé")
    with pytest.raises(DataError, match=r"'z'"):  # beyond the last of the alphabet
        tokenizer.encode("z")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "not a Hugging Face"),
        (b"{}", "not a Hugging Face"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"model":' + b"[" * 100_000, "not a Hugging Face"),
        (b'{"version": ' + b"9" * 5_000 + b"}", "not a Hugging Face"),
        (b'{"added_tokens": [{"id": 99999999999999999999}]}', "not a Hugging Face"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(content, message, tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"wrong.json.*{message}"):
        open_tokenizer(str(path))


def test_an_unknown_tokenizer_is_refused_and_the_known_ones_told():
    with pytest.raises(DataError, match="'byte'.*try bytes, characters"):
        open_tokenizer("byte")


def test_without_the_tokenizers_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(DataError, match="pip install tokenizers"):
        open_tokenizer(str(path))


@pytest.mark.parametrize(
    "spec",
    [{}, {"kind": "runes"}, {"kind": "characters"}, {"kind": "characters", "characters": ""}],
)
def test_a_spec_of_an_unknown_tokenizer_is_refused(spec):
    with pytest.raises(DataError, match="not a tokenizer that this version knows"):
        from_spec(spec)


def test_a_changed_copy_of_a_tokenizer_is_refused_and_its_path_is_not_part_of_the_fingerprint(
    tokenizer_json,
):
    spec = open_tokenizer(str(tokenizer_json)).spec()
    with pytest.raises(DataError, match="sha256"):
        from_spec(spec | {"json": spec["json"] + " "})
    assert tokenizer_fingerprint(spec) == tokenizer_fingerprint(spec | {"path": "elsewhere.json"})
    assert tokenizer_fingerprint(spec) != tokenizer_fingerprint({"kind": "bytes"})


HE = "id of he"  # in the place of an id


# --- the files of a tokenizer -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", "names of the Hugging Face hub are not downloaded"),
        ("meta-llama/Llama-3.1-8B", "names of the Hugging Face hub are not downloaded"),
        ("", "no tokenizer ''"),
        ("a\0b", "no tokenizer"),
        ("x" * 300, "no tokenizer"),
        ("~nobody/tokenizer.json", "no tokenizer"),
        ("pipe", "the tokenizer pipe is not a file"),
        ("folder", "the folder folder holds no tokenizer.json; found tokenizer.model"),
    ],
)
def test_what_is_no_file_is_refused_in_a_line(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.model").touch()
    with pytest.raises(DataError, match=said):
        open_tokenizer(name)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"eos_token": ' + "9" * 5_000 + "}", "{"])
def test_a_damaged_file_beside_a_tokenizer_is_named(name, content, tokenizer_json):
    (tokenizer_json.parent / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} is not JSON"):
        open_tokenizer(str(tokenizer_json.parent))


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
@pytest.mark.parametrize("content", ["[]", "null", '"eos"'])
def test_a_file_beside_a_tokenizer_that_is_no_object_is_named(name, content, tokenizer_json):
    (tokenizer_json.parent / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} is not an object of JSON; found .*; try down"):
        end_of_text(open_tokenizer(str(tokenizer_json.parent)), "auto", str(tokenizer_json.parent))


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("change", ["lost", "renumbered", "shared"])
def test_a_special_token_whose_id_another_token_has_is_refused(change, is_marked, tokenizer_json):
    """The package numbers added tokens by the count of the vocabulary, not as the file says."""
    described = json.loads(tokenizer_json.read_text())
    vocabulary = described["model"]["vocab"]
    end = vocabulary.pop("<|end|>")
    vocabulary |= {token: i - 1 for token, i in vocabulary.items()}  # from 0 on, without a hole
    described["added_tokens"][0] |= {"id": len(vocabulary), "special": is_marked}
    tokenizer_json.write_text(json.dumps(described))
    assert end == 0
    assert open_tokenizer(str(tokenizer_json)).id_of("<|end|>") == len(vocabulary)

    if change == "lost":
        del vocabulary["!"]
    elif change == "renumbered":
        vocabulary["!"] = len(vocabulary)
    else:
        vocabulary["<|end|>"] = vocabulary["!"]
    tokenizer_json.write_text(json.dumps(described))
    with pytest.raises(DataError, match="damaged: two of its tokens have the same id; found '<"):
        open_tokenizer(str(tokenizer_json))


def test_a_pipe_beside_a_tokenizer_is_not_waited_for(tokenizer_json):
    os.mkfifo(tokenizer_json.parent / "tokenizer_config.json")
    assert open_tokenizer(str(tokenizer_json)).size == 280


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "he"}},
        {"tokenizer_config.json": {"eos_token": {"content": "he"}}},
        {"special_tokens_map.json": {"eos_token": {"content": "he"}}},
        {
            "tokenizer_config.json": {"eos_token": None},
            "generation_config.json": {"eos_token_id": HE},
        },
        {"generation_config.json": {"eos_token_id": [HE, 1]}},
        {"config.json": {"eos_token_id": HE}},
    ],
)
def test_the_files_beside_a_tokenizer_name_its_end_of_text(files, tokenizer_json):
    """Whatever its own file marks; no text makes that token then."""
    for name, content in files.items():
        if HE in str(content):
            content = json.loads(
                json.dumps(content).replace(
                    f'"{HE}"', str(open_tokenizer(str(tokenizer_json)).id_of("he"))
                )
            )
        (tokenizer_json.parent / name).write_text(json.dumps(content))
    folder = str(tokenizer_json.parent)
    tokenizer, end = end_of_text(open_tokenizer(folder), "auto", folder)
    assert end is not None and end == tokenizer.id_of("he")
    assert end not in tokenizer.encode("hello there", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("hello there", parse_special=False)) == "hello there"


@pytest.mark.parametrize("ids", ["x", [2, None], {"a": 1}, 2.0])
def test_an_end_of_text_that_is_no_id_is_one_line(ids, tokenizer_json):
    (tokenizer_json.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    folder = str(tokenizer_json.parent)
    with pytest.raises(DataError, match="eos_token_id of .* is no id of a token; found"):
        end_of_text(open_tokenizer(folder), "auto", folder)


# The token that transformers 4.57 and 5.24 put before a text with these files.
BEGINS = [
    (["he"], {}, "he"),
    ([], {}, None),
    ([], {"bos_token": "he", "add_bos_token": False}, None),
    (["he"], {"bos_token": "he", "add_bos_token": True}, "he"),
    (["he"], {"add_bos_token": None}, "he"),
]


@pytest.mark.parametrize(("before", "config", "wanted"), BEGINS)
def test_a_tokenizers_own_files_say_whether_a_token_begins_a_text(
    before, config, wanted, tokenizer_json, put_before_texts
):
    put_before_texts(*before)
    (tokenizer_json.parent / "tokenizer_config.json").write_text(json.dumps(config))
    folder = str(tokenizer_json.parent)
    tokenizer, begin = begin_of_text(open_tokenizer(folder), "auto", folder)
    assert begin == (wanted and tokenizer.id_of(wanted))
    if begin is not None:  # no text makes that token then
        assert begin not in tokenizer.encode("hello there", parse_special=False)
    assert begin_of_text(open_tokenizer(folder), "none", folder)[1] is None
    a = open_tokenizer(folder).id_of("a")
    assert begin_of_text(open_tokenizer(folder), "a", folder)[1] == a
    assert begin_of_text(open_tokenizer("bytes"), "auto", "bytes")[1] is None


@pytest.mark.parametrize(
    ("before", "config", "found"),
    [
        (["he", "<|end|>"], {}, "puts he <|end|> before it"),
        ([], {"add_bos_token": True}, "puts nothing before it, and add_bos_token=true"),
        (["he"], {"add_bos_token": False}, "puts he before it, and add_bos_token=false"),
    ],
)
def test_a_begin_of_text_that_is_not_known_is_asked_for(
    before, config, found, tokenizer_json, put_before_texts
):
    put_before_texts(*before)
    (tokenizer_json.parent / "tokenizer_config.json").write_text(json.dumps(config))
    folder = str(tokenizer_json.parent)
    with pytest.raises(DataError, match=f"begins a text; .* {re.escape(found)}; try --begin-of"):
        begin_of_text(open_tokenizer(folder), "auto", folder)
    with pytest.raises(DataError, match="has no token '<s>' to begin a text with"):
        begin_of_text(open_tokenizer(folder), "<s>", folder)


def test_a_tokenizer_that_would_end_the_process_is_refused(tokenizer_json):
    """The package cuts the prefix off merges by bytes, and aborts within a character."""
    content = json.loads(tokenizer_json.read_text())
    content["model"]["continuing_subword_prefix"] = "\0"
    tokenizer_json.write_text(json.dumps(content))
    with pytest.raises(DataError, match="a merge lacks the prefix"):
        open_tokenizer(str(tokenizer_json))


def test_an_id_beyond_the_size_is_refused(tokenizer_json):
    tokenizer = open_tokenizer(str(tokenizer_json))
    tokenizer.size = 3
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_parts([text])):
        with pytest.raises(DataError, match="its model gives an id that it does not list"):
            encode("hello")


def test_texts_that_hold_the_character_that_ends_one_are_refused():
    tokenizer = open_tokenizer("characters", ["a\U0010ffff"])
    with pytest.raises(DataError, match=r"the texts hold U\+10FFFF"):
        end_of_text(tokenizer, "auto", "characters")


@pytest.mark.parametrize(
    ("name", "content", "library"),
    [
        ("spm.model", b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n", "sentencepiece"),
        ("cl100k.tiktoken", b"IQ== 0\nIg== 1\nIw== 2\n", "tiktoken"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken"),  # as Llama 3 was published
        (
            "tekken.json",
            b'{"config": {"version": "v3"}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}',
            "mistral-common",
        ),
    ],
)
def test_a_tokenizer_of_another_library_is_named_with_the_way_to_ours(
    tmp_path, name, content, library
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"is a tokenizer of {library}.*save_pretrained"):
        open_tokenizer(str(tmp_path / name))
