"""`train.epochs`: as many steps as read the data so often, and one length of a run, not two."""

import json
from decimal import Decimal
from fractions import Fraction

import jax
import numpy as np
import pytest
from helpers import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdtrain.config import ConfigError, RunConfig, from_resolved, load, resolved, to_toml
from spmdtrain.data.batches import batch_ids
from spmdtrain.data.epochs import Endless, counted_in_steps
from spmdtrain.data.source import CorpusData, Source, open_data
from spmdtrain.running.loop import run
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard


class Data:
    """Data of so many samples an epoch, or without an end."""

    def __init__(self, samples: int | Endless):
        self.samples = samples

    def samples_per_epoch(self, config: RunConfig) -> int | Endless:  # noqa: ARG002
        return self.samples


@settings(max_examples=200, deadline=None)
@given(
    epochs=st.decimals("0.01", 50, places=2),
    samples=st.integers(1, 10_000),
    batch=st.integers(1, 500),
)
@example(Decimal("0.1"), 30, 3)  # 0.1 as a binary fraction is a little more than a tenth
def test_the_last_step_is_the_one_in_which_the_last_epoch_ends(epochs, samples, batch):
    config = tiny(f"train.epochs={epochs}", f"train.global_batch={batch}", "optimizer.warmup=0")
    steps = counted_in_steps(config, Data(samples)).train.steps
    wanted = Fraction(epochs) * samples
    assert (steps - 1) * batch < wanted <= steps * batch


@pytest.mark.parametrize("shuffle", ["true", "false"])
@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_an_epoch_is_what_the_stream_of_samples_repeats(packing, shuffle):
    """The sample after the last of an epoch is the first that has been read before, but for where
    its windows begin."""
    config = tiny(
        "train.epochs=1",
        "train.global_batch=1",
        "train.sequence_length=4096",
        f"data.packing={packing}",
        f"data.shuffle={shuffle}",
    )
    config, data = open_data(config)
    assert isinstance(data, CorpusData)
    steps = config.train.steps
    samples = data.train_samples(config)
    first = [samples(batch_ids(step, 1))["tokens"].tobytes() for step in range(steps)]
    assert len(set(first)) == steps
    if shuffle == "false":
        again = [samples(batch_ids(steps + step, 1))["tokens"].tobytes() for step in range(3)]
        assert again == first[:3]
    tokens = sum(int((samples(batch_ids(step, 1))["mask"]).sum()) for step in range(steps))
    assert data.train.size - tokens < 2 * 4096 + len(data.corpus.document_starts)


@pytest.mark.seconds
def test_a_run_says_and_keeps_its_steps_and_more_epochs_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(
        "[model]\nlayers = 1\nembed = 8\nheads = 1\nvocab = 64\n"
        "[data]\ncorpus = 'synthetic'\n"
        "[train]\nepochs = 0.001\nglobal_batch = 8\nsequence_length = 64\n"
    )
    config, _ = open_data(load("c.toml"))
    steps = config.train.steps
    assert 1 < steps < 10
    one = jax.devices()[:1]
    run(load("c.toml"), "run", devices=one)
    said = capsys.readouterr().out
    assert f"train.epochs=0.001: {steps} steps of 8, with " in said
    assert f"finished {steps} steps" in said
    document = json.loads((tmp_path / "run/config.json").read_text())
    assert document["config"]["train"]["steps"] == steps
    assert document["config"]["train"]["epochs"] is None
    assert document["origin"]["train.steps"] == "train.epochs=0.001 of c.toml"
    assert from_resolved(document).train.steps == steps
    run(load("c.toml"), "run", devices=one)
    (more,) = [each for each in capsys.readouterr().out.splitlines() if "to continue:" in each]
    assert more.endswith(f"to continue: --set train.steps={2 * steps}")
    longer = load("c.toml", [f"train.steps={2 * steps}"])
    assert (longer.train.steps, longer.train.epochs) == (2 * steps, None), "it works as it is typed"
    run(load("c.toml", ["train.epochs=0.0015"]), "run", devices=one)
    assert f"resumed run at step {steps}" in capsys.readouterr().out


def test_the_later_source_says_the_length_and_one_says_it_once(tmp_path):
    base, over = tmp_path / "base.toml", tmp_path / "over.toml"
    base.write_text("[train]\nsteps = 7\n[optimizer]\nwarmup = 3\n")
    over.write_text("extends = 'base.toml'\n[train]\nepochs = 2.0\n")
    assert (load(over).train.epochs, load(over).origin.get("train.steps")) == (2.0, None)
    assert load(over, ["train.steps=9"]).train.epochs is None
    assert load(base, ["train.epochs=4"]).train.epochs == 4
    assert load(base, ["train.epochs=none"]).train.steps == 7
    for both in (["train.steps=3", "train.epochs=1"], ["train.epochs=1", "train.steps=3"]):
        with pytest.raises(ConfigError, match="give the length twice; leave one of them out"):
            load(base, both)
    over.write_text("[train]\nepochs = 2\nsteps = 5\n")
    with pytest.raises(ConfigError, match="train.epochs=2 and train.steps=5"):
        load(over)
    with pytest.raises(ValueError, match="give the length twice"):
        RunConfig(train={"epochs": 1.0, "steps": 5})
    config = load(base, ["train.epochs=0.3"])
    assert from_resolved(resolved(config)).train == config.train
    over.write_text(to_toml(config))
    assert load(over).train.epochs == 0.3


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "true", "many"])
def test_no_number_of_epochs(value):
    with pytest.raises(ConfigError, match=r"train.epochs="):
        tiny(f"train.epochs={value}")


def test_data_without_an_end_and_lengths_that_do_not_fit_are_refused():
    mixed = tiny("train.epochs=2")
    with pytest.raises(
        ConfigError, match="single corpus has epochs; asked train.epochs=2; found a river; try"
    ):
        counted_in_steps(mixed, Data(Endless("a river")))
    own = Source(lambda seed, index: np.zeros(17, np.int32))  # noqa: ARG005
    with pytest.raises(ConfigError, match="custom samples, without an end; try --set"):
        open_data(mixed, own)
    with pytest.raises(ConfigError, match=r"fewer than 2\^31 steps"):
        counted_in_steps(tiny("train.epochs=1e30"), Data(10))
    warm = tiny("train.epochs=1", "optimizer.warmup=30")
    with pytest.raises(
        ConfigError, match=r"warmup=30 is longer than train.steps=10 \(train.epochs"
    ):
        counted_in_steps(warm, Data(160))
    with pytest.raises(ConfigError, match=r"log.profile=\[11\] is beyond train.steps=10"):
        counted_in_steps(tiny("train.epochs=1", "log.profile=11"), Data(160))


def test_epochs_that_are_not_counted_begin_nothing():
    setup = shard(tiny("train.epochs=1"), devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match="has not been counted in steps yet; try config, data"):
        init_state(setup)
