"""Trains and saves a tokenizer, and the ids of texts: FOLDER KIND."""

import json
import pathlib
import sys

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
TEXTS = [
    "to be or not to be, that is the question",
    "  two spaces, and a tab\t\n\nand lines ",
    "naïve café — 日本語 🙂",
    "",
    "HELLO <s> world</s>",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
if kind in ("byte-level BPE", "BPE with dropout", "BPE that adds <s>"):
    tokenizer = tokenizers.Tokenizer(models.BPE(dropout=0.1 if "dropout" in kind else None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    if "adds" in kind:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
elif kind == "Unigram":
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
else:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
tokenizer.train_from_iterator(TEXTS * 20, trainer)
folder.mkdir(parents=True)
tokenizer.save(str(folder / "tokenizer.json"))
if "dropout" in kind:  # what is random is switched off
    tokenizer.model.dropout = None
ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
(folder / "expected.json").write_text(json.dumps({"texts": TEXTS, "ids": ids}))
