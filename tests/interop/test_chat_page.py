"""transformers answers as the page docs/chat_model.md says, with the model that its commands made.

`make test-hf` runs this, where torch and transformers are installed: version 4 or 5.
"""

import contextlib
import io
import os
import shutil

import pytest
from test_docs import DOCS, ROOT, blocks_of, run_bash

pytestmark = pytest.mark.hf


def test_transformers_answers_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.environ["HF_HUB_OFFLINE"] = "1"
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    blocks = blocks_of(DOCS / "chat_model.md")
    answers = [block.output for block in blocks if "sample" in block.body and block.output]
    printed = io.StringIO()
    for block in blocks:
        if block.language == "bash" and block.runs:
            run_bash(block)
        elif block.language == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(block.body, str(block), "exec"), {"__name__": "__main__"})
    assert [printed.getvalue().strip()] == [answer.strip() for answer in answers]
