import pytest


@pytest.fixture
def tokenizer_json(tmp_path):
    """A small byte-level BPE, saved with a truncation that must not reach the documents."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(["hello there, hello again", "to be or not to be"] * 3, trainer)
    tokenizer.enable_truncation(4)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path
