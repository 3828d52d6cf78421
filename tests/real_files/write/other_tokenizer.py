"""Saves the tokenizer file of another library: FOLDER KIND."""

import base64
import json
import pathlib
import sys

folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True)
TEXT = "to be or not to be, that is the question of the whole matter\n"
if kind == "sentencepiece":
    import sentencepiece

    text = folder / "text.txt"
    text.write_text(TEXT * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spm"), vocab_size=24, minloglevel=2
    )
elif kind == "tiktoken":
    import tiktoken.load

    ranks = {bytes([byte]): byte for byte in range(256)} | {b"to": 256, b"be": 257}
    encoding = tiktoken.Encoding(
        "ours", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|end|>": 258}
    )
    assert encoding.encode("to be")[0] == 256
    # As tiktoken.load.dump_tiktoken_bpe writes it, which needs the package blobfile.
    lines = [base64.b64encode(piece) + f" {rank}\n".encode() for piece, rank in ranks.items()]
    (folder / "ours.tiktoken").write_bytes(b"".join(lines))
    assert tiktoken.load.load_tiktoken_bpe(str(folder / "ours.tiktoken")) == ranks
else:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    vocab = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    special = [
        {"rank": at, "token_str": name, "is_control": True}
        for at, name in enumerate(["<unk>", "<s>", "</s>"])
    ]
    config = {
        "pattern": r"\S+|\s+",
        "num_vocab_tokens": 256,
        "default_vocab_size": 356,
        "default_num_special_tokens": 100,
        "version": "v3",
    }
    document = {"config": config, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(document))
    Tekkenizer.from_file(str(folder / "tekken.json"))
