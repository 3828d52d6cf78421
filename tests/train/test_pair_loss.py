"""Preferences: the loss of pairs and its gradients are those of a float64 oracle that sees each
answer apart, and the same on any mesh."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import MESHES, SPLIT, initial_weights, placed, prepared

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logits_of as logits_of_head
from spmdtrain.train.batch import to_devices
from spmdtrain.train.gradients.differentiable import make_loss
from spmdtrain.train.gradients.pair_loss import FIGURES
from spmdtrain.train.step import make_losses

BETA = 0.5
DPO = (
    "train.preference=dpo",
    f"train.preference_beta={BETA}",
    "data.corpus=tokens",
    "data.path=pairs.bin",
    "data.packing=best_fit",
    "train.global_batch=8",
    "model.positions=rope",
)
LENGTH = 16
# Tokens of the two answers with their prompts, for each pair of a sequence.
PAIRS = [[(5, 4)], [(4, 3), (3, 6)], [(8, 9)], [], [(2, 2), (2, 2), (2, 2)], *([[(6, 5)]] * 3)]


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
    return to_devices(samples, np.arange(8), setup.batch_shape, setup.mesh, setup.rules)


def oracle(setup, params) -> tuple[float, dict[str, float], dict[str, np.ndarray]]:
    """(mean loss of a pair, means of the figures, gradients), each answer in a row of its own."""
    pairs = [pair for pairs in answers() for pair in pairs]
    halves = [half for pair in pairs for half in pair]
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
    sums = np.array(
        [
            sum(log_softmax[row, at - 1, ids[at]] for at in np.flatnonzero(learned))
            for row, (ids, learned, _) in enumerate(halves)
        ]
    )
    rewards = BETA * (sums - np.array([reference for _, _, reference in halves]))
    margins = rewards[0::2] - rewards[1::2]
    # d loss / d reward of the chosen; that of the rejected is its opposite.
    pull = -1 / (1 + np.exp(margins)) / len(pairs)
    cotangent = np.zeros_like(logits)
    for row, (ids, learned, _) in enumerate(halves):
        weight = BETA * pull[row // 2] * (1, -1)[row % 2]
        for at in np.flatnonzero(learned):
            cotangent[row, at - 1] -= weight * np.exp(log_softmax[row, at - 1])
            cotangent[row, at - 1, ids[at]] += weight
    (gradients,) = back(cotangent.astype(np.float32))
    means = [(margins > 0).mean(), margins.mean(), rewards[0::2].mean(), rewards[1::2].mean()]
    return np.log1p(np.exp(-margins)).mean(), dict(zip(FIGURES, means, strict=True)), gradients


@cache
def learned_on(mesh: str) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss of a pair, and the gradients, from the weights of one device."""
    setup = prepared(*DPO, *MESHES[mesh])
    find = jax.jit(jax.value_and_grad(make_loss(setup).jitted))
    loss, found = jax.device_get(find(placed(setup, initial_weights(*DPO)), batch_of(setup)))
    return float(loss), found


def test_the_loss_and_its_gradients_are_those_of_the_answers_apart():
    setup = prepared(*DPO)
    params = placed(setup, initial_weights(*DPO))
    loss, figures, want = oracle(setup, params)
    batch = batch_of(setup)
    sums = jax.device_get(jax.jit(make_losses(setup))(params, batch))
    assert sums["tokens"] == sum(map(len, PAIRS)) == 10
    assert {name: sums[name] / 10 for name in FIGURES} == pytest.approx(figures, rel=1e-5)
    found_loss, found = learned_on("one device")
    assert found_loss == pytest.approx(loss, rel=1e-6)
    largest = max(np.abs(x).max() for x in want.values())
    for path, gradient in want.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize("mesh", SPLIT)
def test_pairs_are_learned_alike_on_any_mesh(mesh):
    many = prepared(*DPO, *MESHES[mesh])
    (loss, want), (found_loss, got) = learned_on("one device"), learned_on(mesh)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    largest = max(np.abs(x).max() for x in want.values())
    for path, gradient in want.items():
        in_order = many.model.layout.unstaged(got[path]) if many.model.in_stack(path) else got[path]
        np.testing.assert_allclose(in_order, gradient, rtol=1e-4, atol=2e-6 * largest)
