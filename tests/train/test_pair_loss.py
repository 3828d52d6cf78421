"""Preferences: the losses of pairs and their gradients are those of a float64 oracle that sees each
answer apart, and the same on any mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MESHES, SPLIT, initial_weights, prepared

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logits_of as logits_of_head
from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.gradients.differentiable import make_loss
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.gradients.pair_loss import FIGURES, PAIR_LOSSES, Answers, sum_pairs
from spmdtrain.train.step import find_gradients_of, make_gradients

# Each loss, with its settings by the names of its formula.
KINDS = {
    "dpo": {"beta": 0.5},
    "simpo": {"beta": 2.5, "gamma": 0.3},
    "orpo": {"lambda": 0.4},
}
SETTINGS = (
    "data.corpus=tokens",
    "data.path=pairs.bin",
    "data.packing=best_fit",
    "train.global_batch=8",
    "model.positions=rope",
)
LENGTH = 16
# Tokens of the two answers with their prompts, for each pair of a sequence.
PAIRS = [[(5, 4)], [(4, 3), (3, 6)], [(8, 9)], [], [(2, 2), (2, 2), (2, 2)], *([[(6, 5)]] * 3)]


def prepared_for(kind: str, *overrides: str):
    given = [f"train.preference_{name}={value}" for name, value in KINDS[kind].items()]
    return prepared(*SETTINGS, f"train.preference={kind}", *given, *overrides)


def answers() -> list[list[list[tuple[np.ndarray, np.ndarray, float]]]]:
    """(ids, marks of learned tokens, log-probability of a reference) of sequences, pairs, halves.

    The first token of an answer is part of its prompt.
    """
    random = np.random.default_rng(0)

    def answer(size: int):
        learned = random.random(size) < 0.7
        learned[0], learned[-1] = False, True
        return random.integers(0, 64, size), learned, -4.0 * random.random()

    return [[[answer(size) for size in pair] for pair in pairs] for pairs in PAIRS]


def samples(indices: np.ndarray) -> dict[str, np.ndarray]:
    """The sequences of these pairs, as packing makes them."""
    shape = (len(indices), LENGTH)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions")}
    batch |= {name: np.zeros(shape, np.float32) for name in ("mask", "reference")}
    batch["segment_ids"] = np.zeros(shape, np.int32)
    for row, index in enumerate(indices.tolist()):
        at = 0
        for number, pair in enumerate(answers()[index]):
            for half, (ids, learned, reference) in enumerate(pair):
                size = len(ids) - 1
                place = slice(at, at + size)
                batch["tokens"][row, place] = ids[:-1]
                batch["targets"][row, place] = ids[1:]
                batch["mask"][row, place] = learned[1:]
                batch["positions"][row, place] = np.arange(size)
                batch["segment_ids"][row, place] = 2 * number + half
                batch["reference"][row, at] = reference
                at += size
        batch["segment_ids"][row, at:] = 2 * len(answers()[index])
        batch["positions"][row, at:] = np.arange(LENGTH - at)
    return batch | {"sample": indices.astype(np.uint32)}


def batch_of(setup) -> dict[str, jax.Array]:
    return setup.to_devices(samples, np.arange(8))


def oracle_of_sums(kind: str, sums, counts, references):
    """(losses of pairs, rewards of answers, gradients of the losses to `sums`), float64.

    `sums`, `counts` and `references` [answers]: log-probabilities, learned tokens, those by the
    reference model; of each pair first the chosen answer.
    """
    sums, counts, references = (np.asarray(x, np.float64) for x in (sums, counts, references))
    settings = KINDS[kind]
    sign = np.tile([1.0, -1.0], len(sums) // 2)
    means = sums / counts
    if kind == "dpo":
        score, slope = settings["beta"] * (sums - references), settings["beta"]
        rewards, ahead, weight, of_chosen = score, 0.0, 1.0, 0.0
    elif kind == "simpo":
        score, slope = settings["beta"] * means, settings["beta"] / counts
        rewards, ahead, weight, of_chosen = score, settings["gamma"], 1.0, 0.0
    else:
        probability = np.exp(means)
        score = np.log(probability / (1 - probability))
        slope = 1 / (1 - probability) / counts
        rewards, ahead, weight, of_chosen = settings["lambda"] * means, 0.0, settings["lambda"], 1.0
    margins = score[0::2] - score[1::2] - ahead
    losses = weight * np.log1p(np.exp(-margins)) - of_chosen * means[0::2]
    pulls = np.repeat(-weight / (1 + np.exp(margins)), 2) * sign * slope
    return losses, rewards, pulls - of_chosen * (sign > 0) / counts


@cache
def apart():
    """(weights, answers, their log-probabilities, gradients by the cotangent of logits).

    Each answer is in a row of its own.
    """
    setup = prepared_for("dpo")
    params = placed_arrays(setup, initial_weights(*SETTINGS))
    halves = [half for pairs in answers() for pair in pairs for half in pair]
    tokens = np.zeros((len(halves), LENGTH), np.int32)
    for row, (ids, _, _) in zip(tokens, halves, strict=True):
        row[: len(ids)] = ids
    positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)

    def logits_of(params):
        module, ctx = setup.model.bind(params), ForwardContext(positions)
        x, _ = module.blocks(module.embed(tokens, ctx), ctx)
        return logits_of_head(*module.head(x, ctx))

    logits, back = jax.vjp(jax.jit(logits_of), params)
    logits = np.asarray(logits, np.float64)
    highest = logits.max(-1, keepdims=True)
    log_softmax = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    return params, halves, log_softmax, back


def oracle(kind: str) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(means of the loss and of the figures over pairs, gradients of the mean loss)."""
    _, halves, log_softmax, back = apart()
    sums = [
        sum(log_softmax[row, at - 1, ids[at]] for at in np.flatnonzero(learned))
        for row, (ids, learned, _) in enumerate(halves)
    ]
    counts = [learned.sum() for _, learned, _ in halves]
    references = [reference for _, _, reference in halves]
    losses, rewards, pulls = oracle_of_sums(kind, sums, counts, references)
    cotangent = np.zeros_like(log_softmax)
    for row, (ids, learned, _) in enumerate(halves):
        weight = pulls[row] / len(losses)
        for at in np.flatnonzero(learned):
            cotangent[row, at - 1] -= weight * np.exp(log_softmax[row, at - 1])
            cotangent[row, at - 1, ids[at]] += weight
    (gradients,) = back(cotangent.astype(np.float32))
    margins = rewards[0::2] - rewards[1::2]
    shown = [margins > 0, margins, rewards[0::2], rewards[1::2], losses]
    means = {name: x.mean() for name, x in zip([*FIGURES, "loss"], shown, strict=True)}
    return means, gradients


@cache
def learned(kind: str) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(gradients, sums) on one device."""
    setup = prepared_for(kind)
    batch = batch_of(setup)
    if kind != "dpo":
        del batch["reference"]
    params, *_ = apart()
    return jax.device_get(jax.jit(make_gradients(setup))(params, None, batch, None))


def assert_gradients(found, want, tolerance: float) -> None:
    largest = max(np.abs(x).max() for x in want.values())
    for path, gradient in want.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-4, atol=tolerance * largest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.seconds
def test_the_loss_and_its_gradients_are_those_of_the_answers_apart(kind):
    means, want = oracle(kind)
    found, sums = learned(kind)
    assert sums["pairs"] == sum(map(len, PAIRS)) == 10
    assert sums["tokens"] == sum(marks.sum() for _, marks, _ in apart()[1])
    assert sums["loss"] / 10 == pytest.approx(means.pop("loss"), rel=1e-6)
    assert {name: sums[name] / 10 for name in FIGURES} == pytest.approx(means, rel=1e-5)
    assert_gradients(found, want, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mesh", SPLIT)
def test_pairs_are_learned_alike_on_any_mesh(mesh, monkeypatch):
    """All losses at once, since each mesh is one more program to compile."""
    alone = dict(PAIR_LOSSES)

    def together(answers, **_):
        found = {kind: alone[kind](answers, **settings) for kind, settings in KINDS.items()}
        rewards_bs, _ = found["dpo"]
        return rewards_bs, {kind: losses["loss"] for kind, (_, losses) in found.items()}

    monkeypatch.setitem(PAIR_LOSSES, "dpo", together)
    many = prepared_for("dpo", *MESHES[mesh])
    find = jax.jit(jax.value_and_grad(make_loss(many).jitted))
    loss, got = jax.device_get(
        find(placed_arrays(many, initial_weights(*SETTINGS)), batch_of(many))
    )
    monkeypatch.undo()
    one_device = [learned(kind) for kind in KINDS]
    assert loss == pytest.approx(sum(sums["loss"] for _, sums in one_device) / 10, rel=1e-6)
    in_order = plain_arrays(many, got)
    summed = {path: sum(gradients[path] for gradients, _ in one_device) for path in in_order}
    assert_gradients(in_order, summed, 2e-6)


def test_an_answer_that_is_certain_has_finite_odds():
    sums_bs = jnp.array([[0.0, -3.0, -1.0, 0.0, 0.0, 0.0]])
    learned_bs = jnp.array([[2.0, 3.0, 1.0, 2.0, 0.0, 0.0]])

    def loss(sums_bs):
        answers = Answers(sums_bs, learned_bs, None)
        return sum_pairs("orpo", KINDS["orpo"], answers)["loss"]

    value, gradient = jax.jit(jax.value_and_grad(loss))(sums_bs)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert gradient[0, 0] == -0.5 and (gradient[0, 4:] == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_float16_has_the_gradients_of_float32_however_long_sequences_are(kind, monkeypatch):
    """A scale so small stands for a batch of so many more sequences: means over an answer's tokens
    have small gradients, which a scale over all tokens would make smaller still.
    """
    monkeypatch.setattr(f"{__name__}.LENGTH", 256)
    monkeypatch.setattr(f"{__name__}.PAIRS", [[(120, 110)]] * 8)
    longer = ("train.sequence_length=256", "train.microbatch=2")

    def gradients_in(*precision: str) -> dict[str, np.ndarray]:
        setup = prepared_for(kind, *longer, *precision)
        params = placed_arrays(setup, initial_weights(*SETTINGS, *longer))
        items = init_state(setup).items
        find = jax.jit(find_gradients_of(setup))
        found = find(params, StepInputs(jnp.int32(0), batch_of(setup), items=items))
        return plain_arrays(setup, found.gradients)

    want = gradients_in()
    got = gradients_in("precision.compute=float16", "precision.loss_scale=8")
    for path, x in want.items():
        off = np.linalg.norm(got[path] - x) / np.linalg.norm(x)
        assert off < 0.01, f"{path}: {off:.3f}"
