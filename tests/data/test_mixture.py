"""Which source a sample comes from: exact shares, and a function of the sample index alone."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config import from_resolved, load, resolved, to_toml
from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.data.mixtures import mixture as mixture_module
from spmdtrain.data.mixtures.mixture import LONGEST_PERIOD, Mixture, mix
from spmdtrain.data.prepare.token_writer import write_tokens
from spmdtrain.data.source import open_data
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer
from spmdtrain.running import loop

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def drawn(mixture: Mixture, samples: int) -> np.ndarray:
    """[samples, sources] 1 where a sample comes from a source."""
    source, _ = mixture.locate(np.arange(samples))
    return (source[:, None] == np.arange(len(mixture.counts))).astype(np.int64)


@given(COUNTS)
@settings(max_examples=200, deadline=None)
def test_shares_are_exact_over_any_window_of_a_period_and_never_off_by_a_sample(counts):
    mixture = mix([float(count) for count in counts])
    length = len(mixture.period)
    ones = drawn(mixture, 3 * length)
    before = np.concatenate([np.zeros((1, len(counts)), np.int64), np.cumsum(ones, 0)])
    assert (before[length:] - before[:-length] == mixture.counts).all()
    ideal = np.arange(len(before))[:, None] * np.array(counts) / sum(counts)
    assert np.abs(before - ideal).max() < 1


@given(COUNTS, st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_each_source_gives_its_own_samples_in_order(counts, start):
    """Each once, from its first on, wherever a run goes on."""
    mixture = mix([float(count) for count in counts])
    source, own = mixture.locate(np.arange(start, start + 100))
    for number, count in enumerate(counts):
        mine = own[source == number]
        assert (np.diff(mine) == 1).all()
        assert not len(mine) or abs(mine[0] - start * count / sum(counts)) < 2
    assert mixture.locate(np.zeros(1))[1] == 0


@pytest.mark.parametrize(
    "weights",
    [[0.7, 0.2, 0.1], [0.5, 0.25, 0.25], [1, 1, 1], [0.1, 0.9], [3, 2, 1], [10] + 10 * [1]],
    ids=str,
)
def test_a_source_of_1_sample_in_m_is_in_every_window_of_m_once(weights):
    """Wherever sources let each other: of a half and a third, some samples would have to be
    both.
    """
    mixture = mix(weights)
    length = len(mixture.period)
    ones = drawn(mixture, 4 * length)
    for number, count in enumerate(mixture.counts):
        if length % count == 0 and (weights != [3, 2, 1] or count == 3):
            windows = np.lib.stride_tricks.sliding_window_view(ones[:, number], length // count)
            assert (windows.sum(1) == 1).all()


def arranged_slowly(counts) -> tuple[np.ndarray, np.ndarray]:
    """The period and ranks as they were first found: each slot asks each source."""
    length = sum(counts)
    regular = np.full(length, -1)
    for source in sorted(range(len(counts)), key=lambda source: -counts[source]):
        if length % counts[source] == 0:
            every = length // counts[source]
            for turn in range(every):
                slots = slice((every // 2 + turn) % every, None, every)
                if (regular[slots] == -1).all():
                    regular[slots] = source
                    break
    period = filled_slowly(counts, regular)
    if period is None:
        period = filled_slowly(counts, np.full(length, -1))
    ranks = np.zeros(length, np.int64)
    for source, count in enumerate(counts):
        ranks[period == source] = np.arange(count)
    return period, ranks


def filled_slowly(counts, regular):
    length = len(regular)
    period = regular.copy()
    taken = {source: 0 for source in range(len(counts)) if source not in set(regular.tolist())}
    for slot in np.flatnonzero(regular == -1).tolist():
        best = None
        for source, done in taken.items():
            count = counts[source]
            if done == count or slot < done * length // count:
                continue
            deadline = -(-(done + 1) * length // count)
            if best is None or deadline < best[0]:
                best = (deadline, source)
        if best is None or slot >= best[0]:
            return None
        period[slot] = best[1]
        taken[best[1]] += 1
    return period


@given(
    st.one_of(
        COUNTS,
        st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=40),
        st.lists(st.integers(1, 400), min_size=2, max_size=5),
    )
)
@settings(max_examples=300, deadline=None)
def test_the_order_is_the_one_that_runs_have_always_had(counts):
    mixture = Mixture(tuple(counts))
    period, ranks = arranged_slowly(counts)
    assert mixture.period.tolist() == period.tolist()
    source, own = mixture.locate(np.arange(len(period)))
    assert source.tolist() == period.tolist() and own.tolist() == ranks.tolist()


def test_the_work_of_an_arrangement_hardly_grows_with_the_sources(monkeypatch):
    """Counted: what goes through a heap, and periods that are looked through."""
    work = {"heap": 0}
    push = mixture_module.heappush

    def counted(heap, entry):
        work["heap"] += 1
        push(heap, entry)

    monkeypatch.setattr(mixture_module, "heappush", counted)
    seen = []
    for sources in (7, 70, 700):
        work["heap"] = 0
        mixture = mix([1 + 0.001 * (number % 97) * number for number in range(sources)])
        assert len(mixture.period) == sum(mixture.counts) <= LONGEST_PERIOD
        seen.append(work["heap"] / len(mixture.period))
    assert max(seen) <= 4  # each sample waits once and is ready once, in two tries at most


def test_weights_are_the_decimals_that_they_are_written_as():
    assert mix([0.1, 0.2, 0.7]).counts == (1, 2, 7)
    assert mix([3.0]).counts == (1,)
    long = mix([0.123456789, 0.876543211])
    assert sum(long.counts) == LONGEST_PERIOD
    assert long.shares == pytest.approx([0.123456789, 0.876543211], abs=1 / LONGEST_PERIOD)
    with pytest.raises(ConfigError, match="weight 1e-09 is less than 1 in 65536 samples"):
        mix([1.0, 1e-9])


# --- in a run -----------------------------------------------------------------------------------

CONFIG = """
[model]
name = "gpt"
layers = 1
embed = 16
heads = 2
[train]
steps = 6
global_batch = 8
sequence_length = 8
[optimizer]
schedule = "constant"
[eval]
every = 3
batches = 2
[data]
validation_fraction = 0.2
[[data.mix]]
name = "a"
path = "a.bin"
weight = 0.75
[[data.mix]]
name = "b"
path = ["b.bin", "c.bin"]
weight = 0.25
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Token files of one letter each, so that a token says where it comes from."""
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        write_tokens(name, [name * 100, name * 57], open_tokenizer("bytes"))
    (tmp_path / "mix.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_samples_come_from_their_source_whoever_asks_for_how_many():
    config, data = open_data(load("mix.toml"))
    samples = data.train_samples(config)
    whole = samples(np.arange(80))
    from_a = (whole["tokens"] == ord("a")).all(1)
    assert (
        from_a.sum() == 60
        and from_a.tolist() == (data.mixture.locate(np.arange(80))[0] == 0).tolist()
    )
    assert set(whole["tokens"][~from_a].ravel()) == {ord("b"), ord("c")}
    assert whole["source"].tolist() == (~from_a).astype(int).tolist()
    order = np.random.default_rng(0).permutation(80)
    for rows in np.array_split(order, 7):  # as processes ask for theirs, and resumed runs
        part = samples(rows)
        for name, values in part.items():
            assert np.array_equal(values, whole[name][rows]), name


@pytest.mark.usefixtures("here")
def test_each_source_has_an_order_of_its_own_which_follows_the_seed():
    for name in "de":
        write_tokens(name, [bytes(range(128)).decode() * 3], open_tokenizer("bytes"))
    with open("mix.toml", "w") as file:
        file.write(CONFIG.replace("a.bin", "d.bin").replace('["b.bin", "c.bin"]', '"e.bin"'))

    def firsts(seed: int) -> list[list[int]]:
        """The first token of each of the first samples of both sources."""
        config, data = open_data(load("mix.toml", [f"train.seed={seed}"]))
        tokens = data.train_samples(config)(np.arange(80))["tokens"][:, 0]
        drawn, _ = data.mixture.locate(np.arange(80))
        return [tokens[drawn == source][:20].tolist() for source in (0, 1)]

    found = [*firsts(0), *firsts(1)]
    assert len(set(map(tuple, found))) == 4
    assert found[:2] == firsts(0)


@pytest.mark.usefixtures("here")
def test_the_fingerprint_follows_weights_and_contents_but_not_names():
    def fingerprint(text: str) -> str:
        with open("other.toml", "w") as file:
            file.write(text)
        return open_data(load("other.toml"))[1].fingerprint

    same = fingerprint(CONFIG)
    assert fingerprint(CONFIG.replace('"a"', '"letters"')) == same
    assert fingerprint(CONFIG.replace("0.75", "1.5").replace("0.25", "0.5")) == same
    assert fingerprint(CONFIG.replace("0.75", "0.7")) != same
    assert fingerprint(CONFIG.replace('["b.bin", "c.bin"]', '["c.bin", "b.bin"]')) != same


@pytest.mark.usefixtures("here")
def test_a_mix_is_written_out_and_read_back():
    config = load("mix.toml", ["train.steps=3"])
    with open("written.toml", "w") as file:
        file.write(to_toml(config))
    assert load("written.toml").data == config.data
    assert from_resolved(json.loads(json.dumps(resolved(config)))).data == config.data


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "b"', 'name = "a"', "data.mix has two sources with the same name: a, a"),
        (
            "validation_fraction",
            'path = "a.bin"\nvalidation_fraction',
            "is not read if data.mix is set",
        ),
        (
            "validation_fraction",
            'corpus = "text"\nvalidation_fraction',
            "data.mix has sources of token files",
        ),
        (
            "weight = 0.75",
            "weight = 0.0",
            r"data.mix\[0\].weight=0.0 \(from mix.toml\) must be greater than 0",
        ),
        ("weight = 0.75", "wieght = 0.75", r"unknown key data.mix\[0\].wieght \(from mix.toml\)$"),
        ('path = "a.bin"', "", r"data.mix\[0\].path is missing \(from mix.toml\)$"),
    ],
)
def test_a_mix_that_cannot_be_obeyed_is_refused(old, new, said, here):
    (here / "mix.toml").write_text(CONFIG.replace(old, new, 1))
    with pytest.raises(ConfigError, match=said):
        load("mix.toml")


@pytest.mark.usefixtures("here")
def test_sources_of_different_tokenizers_or_too_few_tokens_are_refused_by_name():
    write_tokens("d", ["d" * 200], open_tokenizer("characters", ["d"]))
    with open("mix.toml", "a") as file:
        file.write('[[data.mix]]\nname = "d"\npath = "d.bin"\n')
    with pytest.raises(DataError, match="data.mix: a and d were made with different tokenizers"):
        open_data(load("mix.toml"))
    write_tokens("e", ["e" * 20], open_tokenizer("bytes"))
    with open("mix.toml", "w") as file:
        file.write(CONFIG.replace("c.bin", "e.bin").replace('"b.bin", ', ""))
    with pytest.raises(
        DataError, match="the validation split of b is too short.*data.validation_fraction"
    ):
        open_data(load("mix.toml"))


def losses(run) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.long
def test_a_run_of_a_mix_goes_on_on_another_mesh_and_validates_each_source(here, capsys):
    def train(run: str, *settings: str) -> None:
        config = load("mix.toml", ["data.packing=best_fit", *settings])
        loop.run(config, run, devices=jax.devices()[:2])

    train("whole", "mesh.data=2")
    train("parts", "mesh.data=2", "train.steps=3", "eval.every=0")
    capsys.readouterr()
    train("parts", "mesh.fsdp=2", "eval.every=0")
    assert losses(here / "parts") == pytest.approx(losses(here / "whole"), rel=1e-6)
    assert "a 75 % (" in capsys.readouterr().out
    events = [
        json.loads(line) for line in (here / "whole" / "events.jsonl").read_text().splitlines()
    ]
    for line in map(json.loads, (here / "whole" / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:
            by_tokens = sum(line[f"loss/{name}"] * line[f"tokens/{name}"] for name in "ab")
            assert line["loss"] * line["tokens"] == pytest.approx(by_tokens)
            assert line["loss/a"] != line["loss/b"]
    evaluated = [event for event in events if event["event"] == "evaluated"]
    assert [event["step"] for event in evaluated] == [3, 6]
    for event in evaluated:
        by_share = 0.75 * event["eval_loss/a"] + 0.25 * event["eval_loss/b"]
        assert (
            event["eval_loss"] == pytest.approx(by_share)
            and event["eval_loss/a"] != event["eval_loss/b"]
        )
