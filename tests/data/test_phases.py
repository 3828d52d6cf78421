"""Phases of a mixture: other weights for a range of samples, and still a function of the sample
index alone.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config import load, to_toml
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import MixPhase
from spmdtrain.data.mixtures.mixture import mix
from spmdtrain.data.mixtures.mixture_phases import PIECES, PhasedMixture, phased
from spmdtrain.data.prepare.token_writer import write_tokens
from spmdtrain.data.source import open_data
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer

LENGTH = 4  # tokens of a sample
SOURCES = 3
WEIGHTS = st.lists(st.integers(0, 9), min_size=SOURCES, max_size=SOURCES).filter(any)
PHASE = st.tuples(st.integers(1, 900), WEIGHTS, st.sampled_from(["none", "linear"]))


def made(phases, weights) -> PhasedMixture:
    ends = np.cumsum([tokens for tokens, *_ in phases]).tolist()
    given = [
        MixPhase(tokens=end, weights=tuple(map(float, each)), change=change)
        for end, (_, each, change) in zip(ends, phases, strict=True)
    ]
    return phased(given, [float(weight) for weight in weights], LENGTH)


@given(st.lists(PHASE, max_size=3), WEIGHTS)
@settings(max_examples=20, deadline=None)
def test_each_source_gives_each_of_its_samples_once_and_in_order(phases, weights):
    mixture = made(phases, weights)
    source, own = mixture.locate(np.arange(1000))
    for number in range(SOURCES):
        mine = own[source == number]
        assert mine.tolist() == list(range(len(mine)))
    counted = np.bincount(source, minlength=SOURCES)
    assert mixture.drawn(1000).tolist() == counted.tolist()
    order = np.random.default_rng(0).permutation(1000)
    again = mixture.locate(order)  # as processes and resumed runs ask
    assert np.array_equal(again[0], source[order]) and np.array_equal(again[1], own[order])


def test_shares_are_those_of_the_phase_and_change_linearly():
    phases = [(400, [1, 1, 0], "none"), (64 * PIECES * LENGTH, [1, 1, 0], "linear")]
    mixture = made(phases, [0, 1, 3])
    source, _ = mixture.locate(np.arange(100 + 64 * PIECES + 400))
    is_of = (source[:, None] == np.arange(SOURCES)).astype(int)
    assert is_of[:100].sum(0).tolist() == [50, 50, 0]
    assert is_of[-400:].sum(0).tolist() == [0, 100, 300]
    before, after = np.array([0.5, 0.5, 0]), np.array([0, 0.25, 0.75])
    for piece in range(PIECES):
        first = 100 + 64 * piece
        middle = before + (after - before) * (piece + 0.5) / PIECES
        found = is_of[first : first + 64].sum(0)
        assert np.abs(found - 64 * middle).max() <= 1.01, "within a sample of its share"
    assert mixture.shares == [0, 0.25, 0.75], "an evaluation weighs by the last phase"


def test_without_phases_it_is_the_mixture():
    alone, mixture = mix([0.7, 0.3]), phased([], [0.7, 0.3], LENGTH)
    samples = np.arange(50)
    assert np.array_equal(mixture.locate(samples), alone.locate(samples))
    assert mixture.identity == ["7", "3"]


CONFIG = """
[train]
steps = 6
global_batch = 4
sequence_length = 8
[data]
validation_fraction = 0.0
[[data.mix]]
name = "a"
path = "a.bin"
[[data.mix]]
name = "b"
path = "b.bin"
[[data.phases]]
tokens = 60
weights = [1, 0]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_tokens(name, [name * 200], open_tokenizer("bytes"))
    (tmp_path / "phases.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_a_run_reads_its_phases_whatever_the_batch():
    config, data = open_data(load("phases.toml"))
    read = data.train_samples(config)(np.arange(24))
    # 60 tokens end within the eighth sample of 8.
    assert read["source"].tolist() == [0] * 8 + [1, 0] * 8
    assert data.describe(config).startswith("a 66.7 % (")
    assert data.describe(config).endswith("of the samples, in 2 phases")
    other = open_data(load("phases.toml", ["train.global_batch=2"]))[1]
    assert other.fingerprint == data.fingerprint
    assert other.train_samples(config)(np.arange(24))["source"].tolist() == read["source"].tolist()
    Path("written.toml").write_text(to_toml(config))
    assert load("written.toml").data == config.data
    without = open_data(load("phases.toml", ["data.phases=[]"]))[1]
    assert without.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("weights = [1, 0]", "weights = [1]", "has 1 weights for the 2 sources"),
        ("weights = [1, 0]", "weights = [0, 0]", "weights of a phase are all 0"),
        (
            "[[data.phases]]",
            "[[data.phases]]\ntokens = 60\nweights = [1, 1]\n[[data.phases]]",
            r"data.phases\[1\].tokens=60: the run has read 60",
        ),
        ("tokens = 60", "tokens = 0", r"data.phases\[0\].tokens=0 .* must be greater than 0"),
    ],
)
def test_phases_that_cannot_be_obeyed_are_refused(old, new, said, here):
    (here / "phases.toml").write_text(CONFIG.replace(old, new, 1))
    with pytest.raises(ConfigError, match=said):
        load("phases.toml")


def test_phases_without_a_mix_are_refused(here):
    text = CONFIG[: CONFIG.index("[[data.mix]]")] + CONFIG[CONFIG.index("[[data.phases]]") :]
    (here / "phases.toml").write_text(text)
    with pytest.raises(ConfigError, match="for the sources of data.mix, and there are none"):
        load("phases.toml")
