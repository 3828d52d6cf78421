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


@pytest.fixture
def put_before_texts(tokenizer_json):
    """Gives that tokenizer a post-processor that puts some of its tokens before a text."""
    tokenizers = pytest.importorskip("tokenizers")

    def put(*tokens):
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
        if tokens:
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single=" ".join([*tokens, "$A"]),
                special_tokens=[(token, tokenizer.token_to_id(token)) for token in tokens],
            )
        tokenizer.save(str(tokenizer_json))

    return put
