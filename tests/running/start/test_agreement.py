"""Processes that were started otherwise than their fellows: refused by name, in all of them."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import optax
import pytest
from helpers import tiny
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.config import CheckpointError, ConfigError, DataError
from spmdtrain.data.source import open_data
from spmdtrain.running.start import agreement
from spmdtrain.running.start.agreement import Said, disagreement

FACTS = {"train.seed": 1, "train.steps": 3, "the corpus": "ab", "the newest checkpoint": None}


def said(*facts: dict) -> list[Said]:
    return [Said(f"h{at}", each) for at, each in enumerate(facts)]


def test_processes_that_say_the_same_agree():
    assert disagreement(said(FACTS)) is None
    assert disagreement(said(FACTS, dict(FACTS), dict(FACTS))) is None
    assert disagreement(said(FACTS, dict(reversed(FACTS.items())))) is None


@given(
    count=st.integers(2, 9),
    odd=st.integers(1, 8),
    name=st.sampled_from([*FACTS, "one that the others lack"]),
    value=st.integers(100, 999),
)
def test_whoever_differs_in_whatever_is_named_with_both_values(count, odd, name, value):
    odd = min(odd, count - 1)
    facts = [dict(FACTS) for _ in range(count)]
    facts[odd][name] = value
    error = disagreement(said(*facts))
    assert error is not None
    then = FACTS.get(name)
    assert f"do not agree about {name};" in str(error)
    assert f"{'none' if then is None else then} in process 0 on h0" in str(error)
    assert f"{value} in process {odd} on h{odd}" in str(error)


def test_the_line_stays_short_where_much_differs():
    facts = [{f"setting_{at}": rank for at in range(300)} for rank in range(1000)]
    text = str(disagreement(said(*facts)))
    assert "setting_0, and about setting_1, " in text and "setting_99" not in text
    assert "2 in process 2 on h2, and 997 other values" in text and len(text) < 500


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("the corpus", DataError),
        ("the tokenizer", DataError),
        ("the newest checkpoint", CheckpointError),
        ("train.seed", ConfigError),
        ("version of jax", ConfigError),
        ("the source of m.Model", ConfigError),
    ],
)
def test_the_exit_code_says_what_is_wrong(name, kind):
    assert type(disagreement(said({name: 1}, {name: 2}))) is kind


class Fellow:
    """Another process, which says what this one would with another start."""

    def __init__(self, monkeypatch):
        self.texts: list[str] = []
        monkeypatch.setattr(agreement.jax, "process_count", lambda: 2)
        monkeypatch.setattr(agreement, "gather_texts", self.answer)

    def answer(self, text: str) -> list[str]:
        self.texts.append(text)
        return [*self.texts[:1], text]


def warm(step):
    return 0.1 * step


def cold(step):
    return 0.2 * step


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train.seed", {"settings": ["train.seed=2"]}),
        ("optimizer.learning_rate", {"settings": ["optimizer.learning_rate=0.5"]}),
        ("mesh.data", {"settings": ["mesh.data=2"]}),
        ("log.every", {"settings": ["log.every=7"]}),
        ("optimizer=", {"seams": {"optimizer": optax.sgd(1.0)}}),
        ("learning_rate=", {"seams": {"learning_rate": cold}}),
        ("learning_rate=", {"seams": {"learning_rate": functools.partial(cold)}}),
        ("--fresh", {"fresh": True}),
        ("--step", {"step": 4}),
        ("--run", {"run": "elsewhere"}),
        ("version of spmdtrain", {"sources": "0.0 (sources 1)"}),
        ("jax_enable_x64", {"of_jax": "jax_enable_x64"}),
        ("the corpus", {"text": "another text " * 100}),
    ],
)
def test_each_thing_that_a_process_is_started_with_is_compared(name, change, tmp_path, monkeypatch):
    Fellow(monkeypatch)
    path = tmp_path / "text.txt"

    def start(
        settings=(), seams=None, fresh=False, run="run", step=None, text="a text " * 200, **more
    ):
        path.write_text(text)
        config = tiny("model.vocab=256", "data.corpus=text", f"data.path={path}", *settings)
        if "sources" in more:
            monkeypatch.setattr(agreement, "our_sources", lambda: more["sources"])
        if "of_jax" in more:
            monkeypatch.setattr(agreement, "OF_JAX", ())
        seams = {"learning_rate": warm} | (seams or {})
        data = open_data(config)[1]
        agreement.check_start(config, data, seams, tmp_path / run, fresh, step)

    start()
    start()
    with pytest.raises((ConfigError, DataError), match=rf"agree about {name}[;,]"):
        start(**change)


@pytest.mark.parametrize("setting", ["train.init_from", "distill.teacher"])
def test_the_newest_checkpoint_of_each_run_that_is_named_is_compared(
    setting, tmp_path, monkeypatch
):
    Fellow(monkeypatch)
    other = tmp_path / "other"
    config = tiny("model.vocab=256", f"{setting}={other}")
    data = open_data(config)[1]
    for step in (1, 2):
        (other / "checkpoints" / str(step)).mkdir(parents=True)
        if step == 1:
            agreement.check_start(config, data, {}, tmp_path / "run", fresh=False)
    with pytest.raises(CheckpointError, match=f"about the newest checkpoint of {setting};"):
        agreement.check_start(config, data, {}, tmp_path / "run", fresh=False)


def test_hosts_may_keep_the_same_data_where_they_like(tmp_path, monkeypatch):
    Fellow(monkeypatch)
    for place in ("a.txt", "b.txt"):
        (tmp_path / place).write_text("one text " * 100)
        config = tiny("model.vocab=256", "data.corpus=text", f"data.path={tmp_path / place}")
        agreement.check_start(config, open_data(config)[1], {}, tmp_path, False)


def start_two(folders: list[Path], *more: list[str]) -> list[subprocess.Popen]:
    """Two processes of one run, each in its own folder, with settings of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"localhost:{listener.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, "-m", "spmdtrain.cli", "train", "c.toml", "--run", "../run",
             "--simulate-devices", "1", "--coordinator", address, "--processes", "2",
             "--process", str(rank), *given],
            cwd=folder, env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, (folder, given) in enumerate(zip(folders, more, strict=True))
    ]  # fmt: skip


@pytest.mark.long
def test_two_hosts_with_other_data_under_one_path_end_before_the_first_step(tmp_path):
    folders = [tmp_path / "h0", tmp_path / "h1"]
    for at, folder in enumerate(folders):
        folder.mkdir()
        (folder / "t.txt").write_text("one and another\n" * (600 - 100 * at))
        (folder / "c.toml").write_text(
            '[model]\nname = "llama"\nlayers = 1\nembed = 16\nheads = 1\n[mesh]\ndata = 2\n'
            "[train]\nsteps = 2\nglobal_batch = 2\nsequence_length = 16\n"
            '[data]\ncorpus = "text"\npath = "t.txt"\n'
        )
    processes = start_two(folders, [], [])
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [5, 5], errors
    for text in errors:
        line = text.strip().splitlines()[-1]
        assert "do not agree about the corpus" in line
        assert "in process 0 on" in line and "in process 1 on" in line
    assert not (tmp_path / "run").exists()
