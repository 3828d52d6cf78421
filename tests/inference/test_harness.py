"""Likelihoods as lm-evaluation-harness asks for them: those of the logits, whatever the batch and
the length.
"""

import dataclasses
import json
import random
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.config import ConfigError, DataError
from spmdtrain.data.chats.jinja_template import JinjaText
from spmdtrain.data.chats.simple_template import CHATML
from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from spmdtrain.inference import evaluate, harness, requests
from spmdtrain.inference.prompts import Stops, read_prompts, text_until_stop

SMALL = (
    "model.layers=1",
    "model.embed=16",
    "model.heads=2",
    "train.sequence_length=16",
    "train.global_batch=4",
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    (folder / "a.txt").write_text("to be or not to be, that is the question. " * 60)
    data = (
        "data.corpus=text",
        f"data.path={folder / 'a.txt'}",
        "data.tokenizer=bytes",
        "model.vocab=none",
    )
    st.run(tiny(*SMALL, *data, "train.steps=2"), folder / "run", devices=jax.devices()[:1])
    return st.open_run(folder / "run")


JINJA = "{% for each in messages %}{{ each.role }}:{{ each.content }}{% endfor %}"


def expected(opened, context, continuation) -> tuple[float, bool]:
    ids = np.concatenate([context, continuation])[-17:]
    logits = np.asarray(st.make_logits(opened.setup)(opened.params, ids[None, :-1]))[0]
    count = min(len(continuation), len(ids) - 1)
    chosen = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]][-count:]
    return float(chosen.sum()), bool((logits.argmax(-1) == ids[1:])[-count:].all())


@pytest.mark.seconds
def test_likelihoods_are_those_of_the_logits_in_the_order_asked(opened):
    encode = opened.tokenizer.encode
    texts = [
        ("to be or", " not"),
        ("t", "o"),
        ("that is the question. ", "to be"),
        ("a long question", "a long answer"),
    ]
    pairs = [(encode(context), encode(continuation)) for context, continuation in texts * 3]
    found = harness.likelihoods(opened, pairs)
    wanted = [expected(opened, *pair) for pair in pairs]
    np.testing.assert_allclose(
        [score for score, _ in found], [score for score, _ in wanted], rtol=1e-4
    )
    assert [is_likeliest for _, is_likeliest in found] == [
        is_likeliest for _, is_likeliest in wanted
    ]
    greedy = st.generate_ids(opened.setup, opened.params, encode("to be"), 3, choice=st.Choice(0))
    assert harness.likelihoods(opened, [(encode("to be"), greedy[-3:])])[0][1]


# Made by lm-eval 0.4.9: map(make_disjoint_window, get_rolling_token_windows(1 to n, 0, limit, 1)).
ROLLING = [
    (0, 4, []),
    (1, 4, [([0], [1])]),
    (3, 4, [([0], [1, 2, 3])]),
    (4, 4, [([0], [1, 2, 3, 4])]),
    (5, 4, [([0], [1, 2, 3, 4]), ([1, 2, 3, 4], [5])]),
    (8, 4, [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8])]),
    (10, 4, [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([6, 7, 8], [9, 10])]),
    (3, 1, [([0], [1]), ([1], [2]), ([2], [3])]),
]


@pytest.mark.parametrize(("tokens", "limit", "wanted"), ROLLING)
def test_a_long_text_is_cut_as_the_harness_cuts_it(tokens, limit, wanted):
    found = requests.rolling_windows(np.arange(1, tokens + 1, dtype=np.int32), 0, limit)
    assert [(before.tolist(), after.tolist()) for before, after in found] == wanted


@pytest.fixture(scope="module")
def merging():
    """A tokenizer that puts letters together across what a task calls question and choice."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = {piece: at for at, piece in enumerate(["<s>", "</s>", " ", "\n", "a", "b"])}
    merges = [("a", "b"), (" ", "a"), ("ab", "ab"), ("b", "\n")]
    vocab = pieces | {"".join(pair): len(pieces) + at for at, pair in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return HuggingFaceTokenizer(tokenizer.to_str(), "tokenizer.json")


def as_the_harness(run, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """`TemplateLM.loglikelihood` and `_encode_pair` of lm-eval 0.4.13, in their order."""
    encode = run.tokenizer.encode
    prefix = run.end_of_text if run.begin_of_text is None else run.begin_of_text
    if context == "":
        ids = encode(continuation).tolist()
        return ([prefix], ids) if prefix != ids[0] else (ids[:1], ids[1:])
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole = run.with_begin(encode(context + continuation)).tolist()
    before = run.with_begin(encode(context)).tolist()
    return before, whole[len(before) :]


@pytest.mark.parametrize("begin", [None, 0], ids=["no begin of text", "begin of text"])
def test_a_choice_is_split_from_its_question_as_the_harness_splits_it(opened, merging, begin):
    """Or refused, where its own models assert that there is a token to score, and not too many."""
    run = dataclasses.replace(
        opened, tokenizer_spec=merging.spec(), begin_of_text=begin, end_of_text=1
    )
    rng = random.Random(1)
    pieces = ["a", "b", "ab", " ", "\n", "<s>", "</s>", "a" * 17]
    refused = 0
    for _ in range(400):
        context, continuation = (
            "".join(rng.choices(pieces, [8, 8, 8, 6, 2, 1, 1, 1], k=rng.randint(least, 4)))
            for least in (0, 1)
        )
        if context and not context.strip():
            continue  # its models assert that there is a context; ours take what precedes a text
        before, scored = as_the_harness(run, context, continuation)
        if 0 < len(scored) <= run.config.model.max_length:
            pair = requests.scored_pair(run, context, continuation)
            assert [ids.tolist() for ids in pair] == [before, scored], (context, continuation)
        else:
            refused += 1
            with pytest.raises(DataError, match="a choice of a task has"):
                requests.scored_pair(run, context, continuation)
    assert 20 < refused < 200


# options, (length, temperature, top_p, until); None: refused
GENERATION = [
    ({"max_gen_toks": 6}, (6, 0, None, ())),
    ({"max_new_tokens": 6, "until": "x"}, (6, 0, None, ("x",))),
    ({"max_tokens": 5, "max_gen_toks": 6, "until": ["x", "y"]}, (6, 0, None, ("x", "y"))),
    ({"max_gen_toks": 6, "do_sample": False, "temperature": 0.8}, (6, 0, None, ())),
    ({"max_gen_toks": 6, "do_sample": True, "temperature": 0.8, "top_p": 0.9}, (6, 0.8, 0.9, ())),
    ({"max_gen_toks": 6, "temperature": 0.8}, (6, 0.8, None, ())),
    ({"max_gen_toks": 6, "num_beams": 1}, (6, 0, None, ())),
    ({"max_gen_toks": 6, "num_beams": 4}, None),
    ({"max_gen_toks": 6, "repetition_penalty": 1.2}, None),
    ({"max_gen_toks": 16}, None),
    ({}, None),  # 256 tokens
]


@pytest.mark.parametrize(("options", "wanted"), GENERATION)
def test_a_text_is_generated_as_the_task_asks(opened, options, wanted):
    """By the names and defaults of `normalize_gen_kwargs`; what a run cannot do is refused."""
    if wanted is None:
        with pytest.raises(DataError, match="a task generates"):
            requests.generation(opened, "to be", options)
        return
    text = requests.generation(opened, "to be or not to be", options)
    choice = text.choice
    assert (text.length, choice.temperature, choice.top_p, text.until) == wanted
    assert len(text.context) == 16 - text.length  # the last tokens, with room for the text


def text_after(run, context: str, options: dict) -> str:
    programs = harness.make_programs(run.setup, run.end_of_text)
    text = requests.generation(run, context, options)
    return harness.generated(run, text, programs, jax.random.key(0))


@pytest.mark.seconds
def test_what_stands_before_a_text_is_the_end_of_another(opened):
    """Or a line break, where the documents of the run had no end; the harness takes it so too."""
    assert requests.token_before_text(opened).tolist() == [ord("\n")]
    ending = dataclasses.replace(opened, end_of_text=255)
    assert requests.token_before_text(ending).tolist() == [255]
    begun = dataclasses.replace(ending, begin_of_text=254)
    assert requests.token_before_text(begun).tolist() == [254]
    # The likeliest text ends before the token that ends one, and does not hold it.
    whole = text_after(opened, "to be", {"max_gen_toks": 6})
    third = dataclasses.replace(opened, end_of_text=int(opened.tokenizer.encode(whole)[2]))
    shorter = text_after(third, "to be", {"max_gen_toks": 6})
    assert whole.startswith(shorter) and len(shorter) <= 2


def test_the_harness_asks_and_is_answered(opened):
    instance = pytest.importorskip("lm_eval.api.instance")
    model = harness.harness_model(opened)

    def ask(kind, *arguments):
        request = instance.Instance(request_type=kind, doc={}, arguments=arguments, idx=0)
        return getattr(model, kind)([request])[0]

    encode = opened.tokenizer.encode
    score, _ = ask("loglikelihood", "to be", " or")
    assert score == pytest.approx(expected(opened, encode("to be"), encode(" or"))[0], rel=1e-4)
    rolling = ask("loglikelihood_rolling", "to be or not to be, that is")
    assert rolling < score < 0
    text = ask("generate_until", "to be", {"until": ["zzz"], "max_gen_toks": 5})
    assert len(encode(text)) >= 5 or "\ufffd" in text


def test_without_the_package_there_is_one_line(opened, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ConfigError, match="lm_eval is not installed; try pip install lm-eval"):
        harness.evaluate_tasks(opened.run, ["hellaswag"])


class Harness:
    """A stand-in for the package: asks for one continuation, and says how likely it was."""

    asked = ("to be or", " not")

    class LM:
        pass

    class TaskManager:
        all_tasks = ("lambada_openai", "lambada_openai_cloze", "pairs")

    @classmethod
    def simple_evaluate(cls, model, tasks, limit, bootstrap_iters=100_000):  # noqa: ARG003
        request = SimpleNamespace(args=cls.asked)
        score, is_likeliest = model.loglikelihood([request] * limit)[-1]
        text = model.generate_until([SimpleNamespace(args=("to be", {"max_gen_toks": 2}))])[0]
        made = {"alias": tasks[0], "score,none": score, "acc,none": int(is_likeliest)}
        return {"results": {tasks[0]: made | {"characters,none": len(text)}}}

    @classmethod
    def install(cls, monkeypatch):
        modules = {
            "lm_eval": cls,
            "lm_eval.api": SimpleNamespace(),
            "lm_eval.api.model": SimpleNamespace(LM=cls.LM),
            "lm_eval.tasks": SimpleNamespace(TaskManager=cls.TaskManager),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)


TASKS = ("eval.every=1", "eval.tasks=pairs", "eval.tasks_every=2", "eval.task_examples=3")


@pytest.mark.seconds
def test_what_is_asked_begins_as_the_documents_of_the_run(opened):
    """The harness asks for a text, and so do `sample` and `eval`; what they return shows none."""
    begun = dataclasses.replace(opened, begin_of_text=254)
    encode = opened.tokenizer.encode
    asked, plain = read_prompts(begun, ["to be", "or"]), read_prompts(opened, ["to be", "or"])
    for one, other in zip(asked.ids, plain.ids, strict=True):
        assert one.tolist() == [254, *other.tolist()]
    assert begun.with_begin(asked.ids[0]) is asked.ids[0]  # one that has it gets no second
    assert text_until_stop(asked, asked.ids[0], len(asked.ids[0]), Stops((), ())) == "to be"
    ids = evaluate._as_document(dataclasses.replace(begun, end_of_text=255), encode("be"))
    assert ids.tolist() == [254, *encode("be"), 255]
    # A published template writes it itself.
    message = [{"role": "user", "content": "be"}]
    for template, first in ((CHATML, 254), (JinjaText(JINJA).spec, ord("u"))):
        run = dataclasses.replace(begun, template=template)
        assert read_prompts(run, message).ids[0][0] == first


@pytest.mark.seconds
def test_tasks_are_run_while_training_on_the_mesh_that_is_there(opened, tmp_path, monkeypatch):
    """Every second evaluation and the last one; the figures are those of the saved weights."""
    Harness.install(monkeypatch)
    data = (
        "data.corpus=text",
        f"data.path={opened.config.data.path}",
        "data.tokenizer=bytes",
        "model.vocab=none",
        "data.validation_fraction=0.1",
    )
    mesh = ("mesh.fsdp=2", "mesh.tensor=2", "train.steps=3")
    st.run(tiny(*SMALL, *data, *TASKS, *mesh), tmp_path / "run", devices=jax.devices()[:4])
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    found = {line["step"]: line for line in lines if "task/pairs/score" in line}
    assert sorted(found) == [2, 3]
    assert "task/pairs/characters" in found[3] and "task/pairs/alias" not in found[3]
    saved = st.open_run(tmp_path / "run")
    encode = saved.tokenizer.encode
    score, is_likeliest = expected(saved, encode("to be or"), encode(" not"))
    assert found[3]["task/pairs/score"] == pytest.approx(score, rel=1e-4)
    assert found[3]["task/pairs/acc"] == is_likeliest


@pytest.mark.seconds
def test_tasks_that_cannot_be_run_are_refused_before_the_first_step(opened, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match="lm_eval is not installed"):
        st.run(tiny(*SMALL, *TASKS), tmp_path / "none", devices=jax.devices()[:1])
    Harness.install(monkeypatch)
    with pytest.raises(ConfigError, match="the data has no tokenizer"):
        st.run(tiny(*SMALL, *TASKS), tmp_path / "ids", devices=jax.devices()[:1])
    misspelled = (*TASKS, "eval.tasks=pairs,lambda_openai")
    line = "lm_eval knows no task 'lambda_openai'; try lambada_openai, lambada_openai_cloze"
    with pytest.raises(ConfigError, match=line):
        st.run(tiny(*SMALL, *misspelled), tmp_path / "task", devices=jax.devices()[:1])
    # A choice without a token of its own ends no run at its first evaluation: it begins none.
    monkeypatch.setattr(Harness, "asked", ("to be or", ""))
    data = ("data.corpus=text", f"data.path={opened.config.data.path}", "model.vocab=none")
    text = (*data, "data.tokenizer=bytes", "data.validation_fraction=0.1")
    with pytest.raises(DataError, match="no token of its own"):
        st.run(tiny(*SMALL, *text, *TASKS), tmp_path / "task", devices=jax.devices()[:1])
    assert not (tmp_path / "task" / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match="eval.every=0 asks for none"):
        tiny("eval.tasks=pairs")
