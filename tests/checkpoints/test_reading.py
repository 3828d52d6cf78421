"""What is done with a trained run: its loss on any text and any mesh, texts in a batch, texts that
end.
"""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("shared_programs")

TEXT = "It was the best of times, it was the worst of times. " * 40
SMALL = (
    "model.layers=2",
    "model.embed=16",
    "model.heads=2",
    "train.sequence_length=8",
    "train.global_batch=4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run on a text of one's own, its characters as tokens, with a learned table of 8
    positions.
    """
    folder = tmp_path_factory.mktemp("reading")
    (folder / "times.txt").write_text(TEXT)
    data = (
        "data.corpus=text",
        f"data.path={folder / 'times.txt'}",
        "data.tokenizer=characters",
        "model.vocab=none",
    )
    more = ("train.steps=4", "checkpoint.every=2", "eval.every=4", "optimizer.warmup=0")
    st.run(tiny(*SMALL, *data, *more), folder / "run", devices=jax.devices()[:1])
    return folder


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.long
def test_the_loss_is_that_of_the_run_and_of_any_mesh(here, capsys):
    lines = map(json.loads, (here / "run/metrics.jsonl").read_text().splitlines())
    of_run = next(line["eval_loss"] for line in lines if "eval_loss" in line)
    found = st.evaluate("run")
    assert found["loss"] == pytest.approx(of_run, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(of_run), rel=1e-5)
    assert found["tokens"] == found["bytes"], "a character is a byte here"
    assert found["bits_per_byte"] == pytest.approx(of_run / math.log(2), rel=1e-5)
    split = [
        word for axis in ("data", "tensor", "pipeline") for word in ("--set", f"mesh.{axis}=2")
    ]
    assert main(["eval", "run", "--json", *split, "--set", "train.microbatch=1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("data") == found.pop("data")
    assert printed == pytest.approx(found, rel=1e-5)
    assert main(["eval", "run", "--step", "2"]) == 0
    printed = capsys.readouterr().out
    assert "bits per byte" in printed and "step 2)" in printed
    assert f"{of_run:.4f}" not in printed


@pytest.mark.seconds
def test_any_files_are_evaluated_whole_with_the_runs_own_tokenizer(here):
    Path("some.jsonl").write_text(
        "".join(json.dumps({"story": TEXT[at : at + 53]}) + "\n" for at in (0, 53))
    )
    found = st.evaluate("run", ["some.jsonl"], field="story")
    assert found["tokens"] == 2 * 53 - 1
    Path("same.txt").write_text(TEXT[:106])
    same = st.evaluate("run", ["same.txt"])
    assert (found.pop("data"), same.pop("data")) == ("some.jsonl", "same.txt")
    assert same == pytest.approx(found)
    with pytest.raises(DataError, match="character 'z'"):
        Path("zebra.txt").write_text("zebra")
        st.evaluate("run", ["zebra.txt"])
    with pytest.raises(ConfigError, match="asked --set model.layers=3; try --set of mesh"):
        st.evaluate("run", overrides=["model.layers=3"])
    del here


@pytest.mark.seconds
def test_the_loss_of_documents_is_what_the_logits_say(here):
    del here
    text = TEXT[:9]
    opened = st.open_run("run")
    ids = opened.tokenizer.encode(text)
    logits = st.make_logits(opened.setup)(opened.params, ids[None, :-1])[0]
    losses = -jax.nn.log_softmax(logits)[np.arange(8), ids[1:]]
    Path("nine.txt").write_text(text)
    assert st.evaluate("run", ["nine.txt"])["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.seconds
def test_prompts_of_several_lengths_are_one_batch_and_each_text_is_as_if_alone(here):
    del here
    prompts = ["It was", "the", "best of"]
    greedy = st.Choice(temperature=0)
    together = st.generate("run", prompts, 4, choice=greedy)
    alone = [st.generate("run", prompt, 4, choice=greedy) for prompt in prompts]
    assert together == alone
    assert [len(text) for text in together] == [10, 7, 11], (
        "the last is longer than the model's positions"
    )


@pytest.mark.seconds
def test_a_text_ends_before_what_stops_it(here, capsys):
    del here
    whole = st.generate("run", "It was", 12, choice=st.Choice(0))
    stop = whole[9]
    assert stop in whole[6:]
    wanted = whole[: 6 + whole[6:].index(stop)]
    Path("prompts.txt").write_text("It was\n\nIt was\n")
    asked = ["sample", "run", "--temperature", "0", "--length", "12", "--stop", stop, "--json"]
    assert main([*asked, "--prompts", "prompts.txt"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"prompt": "It was", "text": wanted}] * 2
    assert main([*asked, "--prompts", "prompts.txt", "--prompt", "a"]) == ConfigError.exit_code


@pytest.mark.seconds
def test_the_token_that_ends_a_document_ends_a_text(here, monkeypatch, capsys):
    """With the id of a token that the model likes in its place, as it has no such token."""
    from spmdtrain.inference import sample

    asked = [
        "sample",
        "run",
        "--prompt",
        "It was",
        "--temperature",
        "0",
        "--length",
        "12",
        "--stop",
        "end-of-text",
    ]
    assert main(asked) == ConfigError.exit_code
    assert "trained without a token that ends a text" in capsys.readouterr().err
    whole = st.generate("run", "It was", 12, choice=st.Choice(0))
    tokenizer = st.open_run("run").tokenizer
    liked = int(tokenizer.encode(whole[8])[0])
    monkeypatch.setattr(sample, "_end_of_text", lambda *_: liked)
    assert main(asked) == 0
    assert capsys.readouterr().out.removesuffix("\n") == whole[: 6 + whole[6:].index(whole[8])]
    del here


@pytest.mark.seconds
def test_a_run_knows_what_ends_its_documents_and_is_evaluated_on_texts_that_end_so(
    tmp_path, monkeypatch
):
    """Of texts and of the token file that is made of them alike; the token that ends a text has no
    bytes.
    """
    from spmdtrain.inference import sample

    monkeypatch.chdir(tmp_path)
    Path("ab.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["ab" * 20, "é" * 9] * 4)
    )
    assert main(["data", "prepare", "ab.jsonl", "--out", "ab", "--end-of-text", "\n"]) == 0
    data = (
        "data.corpus=tokens",
        "data.path=ab.bin",
        "model.vocab=none",
        "data.validation_fraction=0",
    )
    st.run(
        tiny(*SMALL, *data, "train.steps=1", "optimizer.warmup=0"), "run", devices=jax.devices()[:1]
    )
    opened = st.open_run("run")
    assert opened.end_of_text == sample._end_of_text(opened) == ord("\n")
    found = st.evaluate("run", ["ab.jsonl"])
    assert found | {"data": "ab.bin"} == st.evaluate("run", ["ab.bin"])
    assert (found["tokens"], found["bytes"]) == (4 * (41 + 19) - 1, 4 * (40 + 18) - 1)


def test_token_files_of_another_tokenizer_are_refused(here):
    del here
    assert main(["data", "prepare", "times.txt", "--out", "bytes"]) == 0
    with pytest.raises(
        DataError, match="bytes.bin was made with another tokenizer than the run's; try the texts"
    ):
        st.evaluate("run", ["bytes.bin"])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([[1] * 9], "9 tokens are more than the model has positions"),
        ([[1, 300]], "the id 300"),
        ([[1, -1]], "the id -1"),
        ([[1, 2**40]], "the id 1099511627776"),
        ([1, 2], "shape \\(2,\\)"),
        ([[1.0, 2.0]], "dtype float64"),
        ([[]], "empty|no token|nothing"),
    ],
)
def test_logits_of_what_is_no_batch_of_tokens_are_refused(here, tokens, said):
    del here
    opened = st.open_run("run")
    with pytest.raises(ConfigError, match=said) as error:
        st.make_logits(opened.setup)(opened.params, tokens)
    assert "\n" not in str(error.value)
