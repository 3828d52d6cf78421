"""examples/encoder.py: restores masked tokens, the same ones on any mesh and after any stop."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import MESHES, SPLIT, batches_of, mesh_of, tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import ConfigError
from spmdtrain.config.named_code import import_named
from spmdtrain.models.context import sample_corruption
from spmdtrain.models.layers import Attention
from spmdtrain.running.report.metrics import make_figures
from spmdtrain.train.corrupt import make_corrupt
from spmdtrain.train.step import make_eval_step, make_step

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
Encoder = import_named(str(EXAMPLES / "encoder.py:Encoder"), "model.make")
MASK = 64  # behind the 64 ids of the synthetic corpus
UNEVEN = ("model.vocab=65", "data.packing=documents")
DEVICES = jax.devices()


def sharded(*settings: str, make=Encoder) -> st.Setup:
    return st.shard(tiny(*UNEVEN, *settings), make, DEVICES[: mesh_of(settings)])


@cache
def trained(mesh: str) -> np.ndarray:
    """Loss and tokens of five steps, [step, 2]."""
    setup = sharded(*MESHES[mesh])
    state = st.init_state(setup)
    step = make_step(setup)
    figures = []
    with batches_of(setup) as ahead:
        for _ in range(5):
            state, out = step(state, next(ahead))
            figures.append(jax.device_get([out["loss"], out["tokens"]]))
    return np.array(figures)


@pytest.mark.parametrize("mesh", SPLIT)
def test_a_mesh_masks_the_same_tokens_and_has_the_same_losses(mesh):
    steps, of_one = trained(mesh), trained("one device")
    np.testing.assert_array_equal(steps[:, 1], of_one[:, 1])
    np.testing.assert_allclose(steps[:, 0], of_one[:, 0], rtol=1e-5)
    assert len(set(of_one[:, 1])) > 1, "each step chooses its own"


def test_the_loss_is_the_cross_entropy_of_the_chosen_tokens_alone():
    """Both from the logits of all tokens, which `make_logits` gives."""
    setup = sharded("data.packing=stream")
    params = st.init_state(setup).params
    with batches_of(setup) as ahead:
        batch = next(ahead)
    total, tokens = make_eval_step(setup)(params, batch)
    whole = np.asarray(batch["tokens"][0])
    keys = sample_corruption(0, batch["sample"][0])
    seen, chosen = map(np.asarray, setup.model.corrupt(whole, keys))
    logits_of = st.make_logits(setup)
    logits = np.asarray(logits_of(params, seen))
    log_probability = np.asarray(jax.nn.log_softmax(logits))
    of_token = -np.take_along_axis(log_probability, whole[..., None], -1)[..., 0]
    assert float(tokens) == chosen.sum()
    assert float(total) == pytest.approx(of_token[chosen].sum(), rel=1e-5)
    other = seen.copy()
    other[:, -1] = (other[:, -1] + 1) % MASK
    moved = np.abs(np.asarray(logits_of(params, other)) - logits).max((0, 2))
    assert (moved > 0).all(), "the first token sees the last one"


def test_the_shares_are_those_of_bert_and_a_sequence_is_masked_for_itself():
    corrupt = sharded().model.corrupt
    tokens = np.random.default_rng(0).integers(0, MASK, (64, 1024)).astype(np.int32)
    sample = np.arange(64, dtype=np.uint32)
    seen, chosen = map(np.asarray, corrupt(tokens, sample_corruption(3, sample)))
    assert (seen == tokens)[~chosen].all()
    assert chosen.mean() == pytest.approx(0.15, abs=0.01)
    found = seen[chosen]
    assert (found == MASK).mean() == pytest.approx(0.8, abs=0.02)
    kept = (found == tokens[chosen]).mean()  # a random token may be the same
    assert kept == pytest.approx(0.1 + 0.1 / MASK, abs=0.02)
    some = [40, 7]
    alone, _ = corrupt(tokens[some], sample_corruption(3, sample[some]))
    np.testing.assert_array_equal(alone, seen[some])
    assert (np.asarray(corrupt(tokens, sample_corruption(4, sample))[1]) != chosen).any()


def test_what_does_not_count_is_neither_masked_nor_restored():
    setup = sharded()
    with batches_of(setup) as ahead:
        batch = next(ahead)
    batch["mask"] = batch["mask"].at[:, :, ::2].set(0)
    made = make_corrupt(setup)(batch)
    without = np.asarray(batch["mask"]) == 0
    assert not np.asarray(made["mask"])[without].any()
    tokens = np.asarray(batch["tokens"])
    np.testing.assert_array_equal(np.asarray(made["tokens"])[without], tokens[without])
    np.testing.assert_array_equal(made["targets"], tokens)


class Forgetful(st.Transformer):
    def corrupt(self, tokens_bt, key_b):
        del key_b
        return tokens_bt


def test_a_corruption_without_a_choice_is_one_line():
    said = r"corrupt\(tokens_bt, key_b\) of .*; asked \(tokens int32.*; found int32\[16, 16\]$"
    with pytest.raises(ConfigError, match=said):
        make_step(sharded(make=Forgetful))


class SeesAll(st.Transformer):
    def __init__(self, config, rngs):
        super().__init__(config, rngs, attention=partial(Attention, causal=False))


def test_attention_that_is_not_causal_keeps_no_cache():
    setup = sharded(make=SeesAll)
    with pytest.raises(ConfigError, match="a key-value cache holds earlier tokens"):
        st.generate_ids(setup, st.init_state(setup).params, [1, 2, 3], 2)


SMALL = (
    "model.layers=2",
    "model.embed=16",
    "model.heads=2",
    "train.sequence_length=16",
    "train.global_batch=8",
    "eval.every=2",
    "eval.batches=2",
    "optimizer.schedule=constant",
    "optimizer.warmup=1",
    *(f"mesh.{axis}=1" for axis in ("data", "fsdp", "tensor")),
)


def train(run: str, *more: str) -> int:
    settings = [word for text in (*SMALL, *more) for word in ("--set", text)]
    return main(["train", "examples/encoder.toml", "--run", run, *settings])


def figures(run: str) -> list[tuple]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("eval_loss")) for line in lines]


def test_from_the_command_line_it_trains_goes_on_to_the_bit_and_makes_no_text(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:1])
    Path("examples").symlink_to(EXAMPLES)
    assert train("whole", "train.steps=4") == 0
    for steps in (2, 4):
        assert train("cut", f"train.steps={steps}") == 0
    assert len(figures("whole")) == 6
    assert figures("cut") == figures("whole")
    capsys.readouterr()
    settings = [word for text in SMALL for word in ("--set", text)]
    assert main(["show", "examples/encoder.toml", *settings]) == 0
    assert "chosen = 0.15" in capsys.readouterr().out
    own = ["--make", "examples/encoder.py:Encoder"]
    assert main(["eval", "whole", *own, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["bits_per_byte"] is None, "most bytes were seen"
    assert main(["sample", "whole", *own, "--prompt", "def "]) == ConfigError.exit_code
    assert capsys.readouterr().err == (
        "spmdtrain: Encoder restores tokens from all the others; asked the tokens after a prompt; "
        "found Encoder.corrupt; try spmdtrain eval RUN, or make_logits in Python\n"
    )


def test_speed_is_of_all_tokens_that_are_read_not_of_the_chosen():
    setup = sharded()
    found = make_figures(setup)(1, {"tokens": 38.0, "loss": 1.0}, 0.5)
    assert (found["tokens"], found["tokens_per_second"]) == (38, 16 * 16 / 0.5)
