"""A long text that is encoded in windows has the tokens of the whole."""

import random
from itertools import chain

import numpy as np
import pytest

from spmdtrain.data.tokenizers import huggingface_tokenizer, windows
from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from spmdtrain.data.tokenizers.offsets import Encoding
from spmdtrain.data.tokenizers.windows import encode_in_windows, grouped

tokenizers = pytest.importorskip("tokenizers")
PRE = tokenizers.pre_tokenizers
KINDS = {
    "byte level": (PRE.ByteLevel(add_prefix_space=True), " "),
    "metaspace": (PRE.Metaspace(), " "),
    "one word": (PRE.ByteLevel(add_prefix_space=False), ""),
}


def text_of(length: int, space: str = " ") -> str:
    source = random.Random(length)
    words = ["".join(source.choices("abcdeä😀", k=source.randint(1, 9))) for _ in range(200)]
    return space.join(source.choices(words, k=length))[:length]


def made(kind: str) -> tuple[HuggingFaceTokenizer, str]:
    """A tokenizer, and what is between the words of its texts."""
    pre_tokenizer, space = KINDS[kind]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = [*PRE.ByteLevel.alphabet(), *"ä😀▁"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text_of(5000, " ")], trainer)
    return HuggingFaceTokenizer(tokenizer.to_str(), kind), space


@pytest.mark.parametrize("kind", KINDS)
def test_windows_give_the_tokens_of_the_whole_text(kind, monkeypatch):
    tokenizer, space = made(kind)
    lengths = []
    encode = tokenizer._with_offsets

    def counted(package, text):
        lengths.append(len(text))
        return encode(package, text)

    monkeypatch.setattr(tokenizer, "_with_offsets", counted)
    texts = [text_of(length, space) for length in (50, 800, 801, 3000, 0, 7777)]
    whole = tokenizer.encode_batch(texts)
    assert not lengths  # all of them are short
    for module in (huggingface_tokenizer, windows):
        monkeypatch.setattr(module, "LONGEST", 800)
    monkeypatch.setattr(encode_in_windows, "__defaults__", (400, 120))
    found = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in whole]
    assert max(lengths) <= 400 and sum(lengths) < 2 * sum(map(len, texts))


def test_windows_that_never_agree_grow_to_the_whole():
    """Each token hangs on all that stands before it."""

    def encode(text: str) -> Encoding:
        places = np.arange(len(text))
        ids = np.cumsum([ord(letter) for letter in text])
        return Encoding(ids.astype(np.int32), places, places + 1)

    text = text_of(1000)
    assert encode_in_windows(text, encode, 100, 40).tolist() == encode(text).ids.tolist()


def test_groups_keep_order_and_stay_within_their_size():
    texts = ["a" * length for length in (3, 3, 5, 20, 0, 9, 1, 1)]
    groups = list(grouped(texts, 10))
    assert list(chain.from_iterable(groups)) == texts
    assert all(len(group) == 1 or sum(map(len, group)) <= 10 for group in groups)
