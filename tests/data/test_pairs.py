"""Pairs of answers: rows become documents of two conversations, each pair lies whole in a window,
and a reference model's log-probabilities are kept with the tokens."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config.errors import CheckpointError, ConfigError, DataError
from spmdtrain.data.batches import Range
from spmdtrain.data.chats.conversation import ChatFields, read_conversation, read_pair
from spmdtrain.data.corpus import token_corpus
from spmdtrain.data.packing import PackedWindows
from spmdtrain.data.texts.parquet_columns import no_field
from spmdtrain.data.token_files.references import reference_paths, write_references
from spmdtrain.data.token_files.tokens import open_tokens

USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))
)
LENGTH = 64
SETTINGS = (
    "model.layers=1",
    "model.embed=16",
    "model.heads=2",
    "model.vocab=none",
    f"train.sequence_length={LENGTH}",
    "train.global_batch=4",
    "train.steps=2",
    "data.corpus=tokens",
    "data.packing=best_fit",
    "data.validation_fraction=0.3",
)
PAIRS = (*SETTINGS, "data.path=pairs.bin", "eval.every=2")
DPO, SIMPO, ORPO = ((*PAIRS, f"train.preference={kind}") for kind in ("dpo", "simpo", "orpo"))


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Pairs, conversations, and a run that was trained on the latter."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {"prompt": f"q{at}", "chosen": "good" * (at % 3 + 1), "rejected": [BAD]} for at in range(12)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [{"messages": [USER, GOOD]}] * 20
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    template = ["--template", "<{role}>{content}\n"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, more in (("pairs", ["--pairs"]), ("chats", [])):
            command = ["data", "prepare", f"{name}.jsonl", "--chat", "--out", name, *template]
            assert main([*command, *more]) == 0
        st.run(tiny(*SETTINGS, "data.path=chats.bin"), "base", devices=jax.devices()[:1])
        yield folder


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": "bad"},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_every_form_of_a_pair_is_the_same(row):
    chosen, rejected = read_pair(row, "here")
    assert (chosen.messages, rejected.messages) == ([USER, GOOD], [USER, BAD])
    assert chosen.learned == rejected.learned == (False, True)


def test_what_both_answers_begin_with_is_not_learned():
    first = [USER, GOOD, USER]
    chosen, rejected = read_pair({"chosen": [*first, GOOD], "rejected": [*first, BAD]}, "here")
    assert chosen.learned == rejected.learned == (False, False, False, True)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "good", "rejected": "bad"}, "has no prompt"),
        ({"chosen": "good"}, "has a chosen or a rejected answer, not both"),
        (
            {"prompt": "q", "chosen": 3, "rejected": "bad"},
            "'chosen' is neither a text nor messages",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named(row, said):
    with pytest.raises(DataError, match=f"^here.*{said}"):
        read_pair(row, "here")


SYSTEM = {"role": "system", "content": "Be brief."}
TURN = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
OTHER = {"role": "user", "content": "p"}


@pytest.mark.parametrize(
    ("prompt", "answer", "whole"),
    [
        ("q", [SYSTEM, USER], [SYSTEM, USER]),
        (" q\n", [USER], [USER]),
        ("q", [*TURN, USER], [*TURN, USER]),
        ("q", [USER, *TURN[1:], USER], [USER, *TURN[1:], USER]),
        ([SYSTEM, USER], [USER], [SYSTEM, USER]),
        ([SYSTEM, *TURN, USER], [*TURN, USER], [SYSTEM, *TURN, USER]),
        ([USER], [SYSTEM, *TURN, USER], [SYSTEM, *TURN, USER]),
        ([*TURN, USER], [], [*TURN, USER]),
        ([USER], [*TURN[1:], USER], [USER, *TURN[1:], USER]),  # asked again, later
        (TURN, [USER], [*TURN, USER]),
    ],
)
def test_a_prompt_that_the_answers_hold_is_asked_once(prompt, answer, whole):
    """Of pairs, and of prompts with a completion."""
    row = {"prompt": prompt, "chosen": [*answer, GOOD], "rejected": [*answer, BAD]}
    chosen, rejected = read_pair(row, "here")
    assert (chosen.messages, rejected.messages) == ([*whole, GOOD], [*whole, BAD])
    assert chosen.learned == rejected.learned == (False,) * len(whole) + (True,)
    row = {"prompt": prompt, "completion": [*answer, GOOD]}
    completed = read_conversation(row, ChatFields(), "here")
    assert completed.messages == chosen.messages and completed.learned[-1]


@pytest.mark.parametrize("answer", [[OTHER, GOOD], [SYSTEM, OTHER, GOOD], [USER]])
def test_an_answer_that_asks_something_else_is_refused(answer):
    row = {"prompt": "q", "chosen": answer, "rejected": [USER, BAD]}
    with pytest.raises(DataError, match="^here: 'chosen' begins with .*does not hold the prompt"):
        read_pair(row, "here")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "repeats"),
    [
        ("Q: 2?\nA:", " two", " three", True),
        ("Q: 2?\nA:", "two", "three", True),
        ("Q\n\n", "two", "three", True),
        ("Hello", "! How are you?", " you", False),
        ("Hello", "", " you", False),
    ],
)
def test_texts_of_a_pair_that_both_begin_with_the_prompt_lose_it(prompt, chosen, rejected, repeats):
    row = {"prompt": prompt, "chosen": prompt + chosen, "rejected": prompt + rejected}
    pair = read_pair(row, "here")
    before = "" if repeats else prompt
    assert [each.messages[1]["content"] for each in pair] == [before + chosen, before + rejected]
    assert [each.repeats for each in pair] == [repeats] * 2


def test_the_command_counts_repeated_prompts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Q:", "chosen": "Q: good", "rejected": "Q: bad", "completion": "Q: good"}
    Path("a.jsonl").write_text(json.dumps(row) + "\n")
    command = ["data", "prepare", "a.jsonl", "--chat", "--out"]
    for arguments, said in ((["pairs", "--pairs"], "written once"), (["one"], "as part of the")):
        assert main([*command, *arguments]) == 0
        line = "1 conversation has the prompt again at the beginning of what answers it"
        assert f"{line}; it is " in (printed := capsys.readouterr().out) and said in printed


@pytest.mark.seconds
def test_pairs_lie_whole_in_windows_with_their_answers_apart(here):
    del here
    corpus = token_corpus(["pairs.bin"])
    windows = PackedWindows(corpus, Range(1, len(corpus.tokens) - 1), LENGTH)
    batch = windows.samples(np.arange(windows.windows))
    seen = []
    for row in range(windows.windows):
        segments = batch["segment_ids"][row]
        for segment in range(0, 2 * len(windows.pieces(row)), 2):
            pair = []
            for half in (segment, segment + 1):
                inside = segments == half
                assert batch["positions"][row][inside].tolist() == [*range(inside.sum())]
                learned = inside & (batch["mask"][row] == 1)
                assert bytes(batch["tokens"][row][inside].tolist()).startswith(b"<user>q")
                pair.append(bytes(batch["targets"][row][learned].tolist()))
            seen.append(pair)
        assert not batch["mask"][row][segments == 2 * len(windows.pieces(row))].any()
    # The first and the last are cut by the range, and so left out.
    expected = [[b"good" * (at % 3 + 1) + b"\n\xff", b"bad\n\xff"] for at in range(1, 11)]
    assert sorted(seen) == sorted(expected)
    with pytest.raises(
        DataError, match=r"tokens, more than fit .* try --set train.sequence_length="
    ):
        PackedWindows(corpus, Range(0, len(corpus.tokens)), 20)
    with pytest.raises(DataError, match="no pair is whole among 5 tokens"):
        PackedWindows(corpus, Range(1, 6), 20)


@pytest.mark.seconds
def test_a_run_learns_pairs_from_its_reference(here, capsys):
    for path in reference_paths("pairs.bin"):
        path.unlink(missing_ok=True)
    with pytest.raises(
        DataError, match=r"pairs.bin holds no log-prob.* try spmdtrain data reference"
    ):
        st.open_data(tiny(*DPO))
    for path in reference_paths("pairs.bin"):
        path.write_text("{}")  # damaged: it is made anew
    assert main(["data", "reference", "pairs.bin", "base"]) == 0
    assert "pairs.bin: 12 pairs; log-probabilities -" in capsys.readouterr().out
    # They are those of the model, of each answer apart.
    opened = st.open_run("base")
    corpus = token_corpus(["pairs.bin"], references=True)
    assert corpus.references is not None
    ids = opened.tokenizer.encode("<user>q1\n<assistant>goodgood\n").tolist() + [255]
    logits = np.asarray(st.make_logits(opened.setup)(opened.params, np.array([ids])))[0]
    log_softmax = np.asarray(jax.nn.log_softmax(logits))
    want = sum(log_softmax[at - 1, ids[at]] for at in range(len(ids) - 10, len(ids)))
    assert corpus.references[1, 0] == pytest.approx(want, rel=1e-4)
    # A run that begins where its reference is has no margin yet, and a loss of log 2.
    config = tiny(
        *DPO,
        "train.preference_beta=0.1",
        "train.init_from=base",
        "optimizer.warmup=0",
        "optimizer.learning_rate=1e-3",
    )
    st.run(config, "dpo", devices=jax.devices()[:1])
    steps = [json.loads(line) for line in (here / "dpo/metrics.jsonl").read_text().splitlines()]
    first, *_, last = [step for step in steps if "reward_margin" in step]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-4) and first["reward_margin"] < 1e-3
    # The answers have 4 or more bytes and 3, each with two marks of its end.
    assert first["pairs"] >= 4 and first["tokens"] >= 11 * first["pairs"]
    assert last["loss"] < first["loss"] and last["reward_margin"] > 1e-3
    evaluated = [step for step in steps if "eval_loss" in step][-1]
    assert evaluated["eval_pairs"] == evaluated["eval_split_pairs"] == 3
    capsys.readouterr()
    assert main(["eval", "dpo"]) == 0
    assert (
        capsys.readouterr().out
        == f"loss {evaluated['eval_loss']:.4f}  (3 of 3 pairs of pairs.bin, step 2)\n"
    )
    assert st.evaluate("dpo", ["chats.bin"])["tokens"] > 100
    assert isinstance(st.generate("dpo", "<user>q", 2), str)


@pytest.mark.parametrize("settings", [SIMPO, ORPO])
def test_a_loss_without_a_reference_reads_none(settings, here):
    """A run goes on with the same data where a reference is made later."""
    del here
    paths = reference_paths("pairs.bin")
    kept = {path: path.read_bytes() for path in paths if path.exists()}
    for path in paths:
        path.unlink(missing_ok=True)
    config, data = st.open_data(tiny(*settings))
    numbers = np.zeros((12, 2), np.float32)
    write_references(open_tokens("pairs.bin"), numbers, "base", 1)
    later = st.open_data(tiny(*settings))[1]
    for path in paths:
        path.unlink()
    for path, content in kept.items():
        path.write_bytes(content)
    assert later.fingerprint == data.fingerprint
    assert "reference" not in later.train_samples(config)(np.arange(1))
    assert "reference" not in st.shard(config, devices=jax.devices()[:1]).batch


def test_the_end_of_the_first_answer_is_no_surprise(here, capsys):
    (here / "one.jsonl").write_text('{"prompt": "q", "chosen": "good", "rejected": "bad"}')
    assert main(["data", "prepare", "one.jsonl", "--chat", "--pairs", "--out", "one"]) == 0
    said = capsys.readouterr().out
    assert "token 255 ends each document" in said and "before the end" not in said


def test_two_equal_answers_are_refused(here, capsys):
    rows = [("q", "good", "bad"), ("q", "same", "same")]
    keys = ("prompt", "chosen", "rejected")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows]
    (here / "equal.jsonl").write_text("".join(lines))
    command = ["data", "prepare", "equal.jsonl", "--chat", "--pairs", "--out", "equal"]
    assert main(command) == DataError.exit_code
    assert "equal.jsonl, line 2: the chosen answer is the rejected one" in capsys.readouterr().err
    assert not (here / "equal.bin").exists()


def test_references_of_other_tokens_are_refused(here):
    if token_corpus(["pairs.bin"], references=True).references is None:
        assert main(["data", "reference", "pairs.bin", "base"]) == 0
    numbers, described = reference_paths("pairs.bin")
    before, said = numbers.read_bytes(), described.read_text()
    numbers.write_bytes(before[:-4] + b"\0\0\0\0")
    with pytest.raises(DataError, match="pairs.ref is damaged; try spmdtrain data reference"):
        token_corpus(["pairs.bin"], references=True)
    numbers.write_bytes(before)
    described.write_text(json.dumps(json.loads(said) | {"tokens": ["a", "b"]}))
    with pytest.raises(DataError, match="belongs to other tokens than pairs.bin"):
        token_corpus(["pairs.bin"], references=True)
    described.write_text(said)
    assert token_corpus(["pairs.bin"], references=True).references is not None
    del here


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            (*SETTINGS, "data.path=pairs.bin"),
            "holds pairs of answers, of which one is to be avoided",
        ),
        ((*DPO, "data.path=chats.bin"), "chats.bin holds no pairs of answers"),
        ((*DPO, "data.packing=stream"), "each in one sequence; set data.corpus='tokens'"),
        ((*DPO, "train.z_loss=0.1"), "has no train.label_smoothing and no train.z_loss"),
        (
            (*DPO, "train.preference_gamma=0"),
            "gamma=0 belongs to simpo, not to train.preference='dpo'",
        ),
        (
            (*ORPO, "train.preference_beta=1"),
            "beta=1 belongs to dpo and simpo, not to train.preference=",
        ),
        (
            (*SETTINGS, "train.preference_lambda=1"),
            "lambda=1 belongs to orpo, not to train.preference=",
        ),
    ],
)
def test_what_cannot_be_learned_from_pairs_is_one_line(settings, said, here):
    del here
    with pytest.raises(ConfigError, match=said):
        st.open_data(tiny(*settings))


def test_the_example_learns_from_pairs():
    example = str(Path(__file__).parents[2] / "examples/dpo.toml")
    config = st.load(example)
    assert (config.train.of_preference, config.data.packing) == ({"beta": 0.1}, "best_fit")
    other = [st.load(example, [f"train.preference={kind}"]).train for kind in ("simpo", "orpo")]
    assert [each.of_preference for each in other] == [{"beta": 2, "gamma": 1}, {"lambda": 0.1}]


@pytest.mark.seconds
def test_a_start_from_the_weights_of_another_model_is_told_of_model_from(here):
    """As the example's is on an imported model; and what the line says to type fits."""
    settings = (*SETTINGS, "data.path=chats.bin", "train.init_from=base")
    said = r"found model\.embed=16 in the run; try --set model\.from=base"
    with pytest.raises(CheckpointError, match=said):
        st.run(tiny(*settings, "model.embed=32"), "other", devices=jax.devices()[:1])
    (here / "wide.toml").write_text('[model]\nname = "llama"\nembed = 32\n')
    assert st.load("wide.toml", ["model.from=base"]).model.embed == 16


def test_pairs_and_texts_are_not_one_corpus(here):
    del here
    with pytest.raises(DataError, match="only one of them holds pairs"):
        token_corpus(["pairs.bin", "chats.bin"])
    assert main(["data", "reference", "chats.bin", "base"]) == DataError.exit_code


@pytest.mark.parametrize(
    ("pairs", "columns", "fix"),
    [
        (False, ["prompt", "chosen", "rejected"], "--pairs"),
        (True, ["messages", "id"], "no --pairs"),
        (False, ["talk", "id"], "--field talk"),
    ],
)
def test_rows_of_pairs_and_of_conversations_name_the_option_that_reads_them(pairs, columns, fix):
    error = no_field("a.jsonl:1", ChatFields(pairs=pairs), columns, columns[:1])
    assert str(error).endswith(f"found {', '.join(columns)}; try {fix}")
