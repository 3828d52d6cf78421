#!/usr/bin/env bash
# GUESS: the dropout of a BPE (subword regularisation, arXiv:1910.13267) is like that of a model: it belongs to training, and
#        a tokenizer that was saved and loaded for evaluation, generation or the preparation of files encodes one way.
# TRUTH: it is a field of tokenizer.json, and every call of the loaded tokenizer draws: AutoTokenizer has no training mode, no
#        argument of a call and no seed that stops it. One text has hundreds of encodings; all decode to the text, so no
#        round trip shows it. Scores, caches by prefix, prepared files and the resumption of a stream differ from call to
#        call. `tokenizer.backend_tokenizer.model.dropout = None` ends it.
# SEEN:  2026-11-28, transformers 5.24.0, tokenizers 0.23.3, Python 3.11 (the same with transformers 4.57.6, tokenizers 0.22.2):
#          100 calls: about 98 encodings of 14 to 27 tokens, all decoded alike; with dropout None: 1 encoding
# COST:  prepared files differed from start to start, and a resumed stream went on with other tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/saved" << 'PYTHON'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXT = "the cat sat on the mat and the dogs ran after the cat"
trained = Tokenizer(models.BPE(dropout=0.1))
trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
trained.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
trained.train_from_iterator([TEXT] * 9, trainer)
PreTrainedTokenizerFast(tokenizer_object=trained).save_pretrained(sys.argv[1])

loaded = AutoTokenizer.from_pretrained(sys.argv[1])


def encodings() -> set[tuple[int, ...]]:
    return {tuple(loaded(TEXT)["input_ids"]) for _ in range(100)}


drawn = encodings()
decode_alike = all(loaded.decode(ids) == TEXT for ids in drawn)
loaded.backend_tokenizer.model.dropout = None
still = encodings()
lengths = sorted(map(len, drawn))
print(f"100 calls: {len(drawn)} encodings of {lengths[0]} to {lengths[-1]} tokens; all decode alike: {decode_alike}")
print(f"with dropout None: {len(still)} encoding")
assert len(drawn) > 10 and decode_alike and len(still) == 1, "no longer so"
PYTHON
