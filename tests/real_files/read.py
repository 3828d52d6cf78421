"""Reads with our code what a tool has written, and compares it with what the tool says is in it.

Each reader returns what was compared, in a few words; what we refuse is a UserError, and what we
read otherwise an AssertionError.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import spmdtrain as st
from spmdtrain.data.corpus import token_corpus
from spmdtrain.data.prepare.prepare_corpus import Job, prepare
from spmdtrain.data.texts.documents import find_inputs, texts_in
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer
from spmdtrain.inference.harness import likelihoods
from spmdtrain.inference.requests import scored_pair
from spmdtrain.running.published.import_model import import_model

END = 255  # ends a document of bytes, which no text has
OF_FLOAT32 = 2e-5  # root mean square, several times the noise of sums in another order


def expected(folder: Path) -> Any:
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def model(folder: Path) -> str:
    """Imports a model; its logits are those of transformers."""
    run = folder / "run"
    import_model(folder, run, overrides=["precision.params=float32", "precision.compute=float32"])
    opened = st.open_run(run)
    theirs = np.load(folder / "expected.npz")
    ours = np.asarray(st.make_logits(opened.setup)(opened.params, theirs["tokens"]), np.float64)
    ours = ours[..., : theirs["logits"].shape[-1]]
    error = np.sqrt(np.mean((ours - theirs["logits"]) ** 2) / np.mean(theirs["logits"] ** 2))
    assert error < OF_FLOAT32, f"logits differ by {error:.1e}"
    return f"logits within {error:.0e}"


def tokenizer(folder: Path) -> str:
    """Encodes texts as the library did."""
    opened = open_tokenizer(str(folder / "tokenizer.json"))
    wanted = expected(folder)
    for text, ids in zip(wanted["texts"], wanted["ids"], strict=True):
        found = opened.encode(text).tolist()
        assert found == ids, f"{text!r} is {found}, and not {ids}"
    return f"{len(wanted['texts'])} texts, the same ids"


def other_tokenizer(folder: Path) -> str:
    """Opens the tokenizer of a library whose files we do not read."""
    [file] = [path for path in folder.iterdir() if path.suffix in (".model", ".tiktoken", ".json")]
    open_tokenizer(str(file))
    return "opened"


def documents(folder: Path) -> str:
    """Reads the texts of a table in their order."""
    wanted = expected(folder)
    files = find_inputs([str(path) for path in folder.glob("text*")])
    found = list(texts_in(files, "text"))
    assert found == wanted, f"found {found}"
    return f"{len(wanted)} documents, letter by letter"


def conversations(folder: Path) -> str:
    """Prepares conversations, or pairs, and finds every answer in the tokens."""
    wanted = expected(folder)
    pairs = isinstance(wanted[0], dict)
    paths = [str(path) for path in folder.glob("text*")]
    prepare(Job(paths, str(folder / "tokens"), chat=True, pairs=pairs))
    corpus = token_corpus([str(folder / "tokens.bin")])
    text = bytes(token for token in np.asarray(corpus.tokens[:]) if token != END).decode()
    answers = [
        message["content"]
        for each in wanted
        for message in (each["chosen"] + each["rejected"] if pairs else each)
    ]
    assert all(answer in text for answer in answers), text
    return f"{len(wanted)} {'pairs' if pairs else 'conversations'}, each answer found"


def index(folder: Path) -> str:
    """Reads the documents of an indexed dataset."""
    corpus = token_corpus([str(folder / "text.bin")], vocab=256)
    ends = [*corpus.document_starts.tolist()[1:], len(corpus.tokens)]
    found = [
        np.asarray(corpus.tokens[start:end]).tolist()
        for start, end in zip(corpus.document_starts.tolist(), ends, strict=True)
    ]
    assert found == expected(folder), f"found {found}"
    return f"{len(found)} documents, id by id"


def adapter(folder: Path) -> str:
    """Imports a folder of an adapter alone."""
    import_model(folder / "adapter", folder / "run")
    return "imported"


def scores(folder: Path) -> str:
    """Scores continuations as the harness's own model does, and refuses what it asserts."""
    import_model(folder, folder / "run")
    opened = st.open_run(folder / "run")
    wanted = expected(folder)
    scored = refused = 0
    for (context, continuation), theirs in zip(wanted["pairs"], wanted["scores"], strict=True):
        try:
            [ours] = likelihoods(opened, [scored_pair(opened, context, continuation)])
        except st.UserError:
            assert theirs is None, f"{context!r} {continuation!r} is refused, and not {theirs}"
            refused += 1
            continue
        assert theirs is not None, f"{context!r} {continuation!r} is scored {ours}"
        assert abs(ours[0] - theirs[0]) < 1e-4 * max(1, abs(theirs[0])), (context, continuation)
        assert ours[1] == theirs[1], (context, continuation)
        scored += 1
    return f"{scored} scores the same, {refused} refused as there"


jax.config.update("jax_platforms", "cpu")
