"""Defines witnesses: properties that a run must have on one device.

A comparison with one device cannot find an error that one device makes as well: in the loss, the
masks, the seeds, the optimizer, the learning rate. Each witness is an invariant that needs no
second layout.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.schema import AdamW, OptimizerConfig, RunConfig, ScheduleFreeAdamW
from spmdtrain.lab.certify.compare import GRADIENT, Figures, norm, rounding_of
from spmdtrain.lab.certify.noise import Reference
from spmdtrain.lab.certify.stepper import HostBatch, Own, Stepper
from spmdtrain.lab.certify.witnesses.float64_adam import Adam, ScheduleFree, follow
from spmdtrain.train.all_parts import parts_of
from spmdtrain.train.compared.in_order import WEIGHT, Leaf, Plain, placed_state
from spmdtrain.train.corrupt import make_corrupt
from spmdtrain.train.gradients.sums import minimised
from spmdtrain.train.setup import Setup
from spmdtrain.train.step import make_eval_step, make_gradients

SLOPE = 5e-3  # how far finite differences may be from the gradient, relative; measured: 2e-3
SAME = 4 * 2.0**-24  # a loss of the same numbers in another program, relative
MOVED_DOCUMENT = 1e-5  # a loss at other positions, relative
UPDATE = 1e-4  # an update compared with that of optax, relative; measured: 7e-8
AVERAGE = 1e-6
RATE = 2e-6  # float32 compared with Python's float
OTHER_SEED = 7  # added to the run's own
EMA = "ema"
WITHOUT_DECAY = ("bias", "taps")  # in names of parameters; nor have vectors any
MASKED = "masked tokens add no loss and no gradient"


@dataclass(frozen=True)
class Witness:
    """An invariant of a run.

    `holds` is None if it does not apply to the run. `details` has the figures, or the reason.
    """

    name: str
    holds: bool | None
    details: str = ""


def witnesses(reference: Reference, own: Own) -> list[Witness]:
    """Returns all witnesses of a run, in the order of the computations of a step."""
    return [
        _initial_weights(reference, own),
        *_noise(reference, own),
        *_attention(reference),
        _masked(reference),
        slope_witness(reference),
        _rate(reference, own),
        update_witness(reference, own),
        _average(reference),
    ]


# Seed and noise


def _initial_weights(reference: Reference, own: Own) -> Witness:
    name = "initial weights change with the seed"
    other = _other_seed(reference, own).begin()
    mine = reference.states[0]
    random = [leaf for leaf, x in mine.items() if leaf.kind == WEIGHT and np.ptp(x) > 0]
    same = [str(leaf) for leaf in random if np.array_equal(mine[leaf], other[leaf])]
    return Witness(name, not same and bool(random), ", ".join(same[:3]))


def _other_seed(reference: Reference, own: Own) -> Stepper:
    config = reference.stepper.setup.config
    train = config.train.model_copy(update={"seed": (config.train.seed + OTHER_SEED) % 2**32})
    return Stepper(config.model_copy(update={"train": train}), jax.devices()[:1], own)


def _noise(reference: Reference, own: Own) -> Iterator[Witness]:
    names = "noise changes with the step", "noise changes with the seed"
    config = reference.stepper.setup.config
    if not (config.model.dropout or config.finetune.dropout):
        yield from (Witness(name, None, "nothing is dropped out") for name in names)
        return
    here, batch = reference.states[1], reference.batches[1]
    later = here | {Leaf("step"): here[Leaf("step")] + 1}
    first, second = (_loss(reference.stepper, state, batch) for state in (here, later))
    other = _loss(_other_seed(reference, own), here, batch)
    yield Witness(names[0], first != second, f"losses {first:.6f}, {second:.6f}")
    yield Witness(names[1], first != other, f"losses {first:.6f}, {other:.6f}")


def _loss(stepper: Stepper, state: Plain, batch: HostBatch) -> float:
    return stepper.take(state, batch)[1].numbers["loss"]


# What a token sees


def _attention(reference: Reference) -> Iterator[Witness]:
    names = (
        "the past does not see the future",
        "documents do not see each other",
        "a document is the same wherever it stands",
    )
    setup = reference.stepper.setup
    if make_corrupt(setup) is not None:
        yield from (Witness(name, None, "the model is bidirectional") for name in names)
        return
    loss = _evaluated(reference)
    batch = reference.batches[1]
    length = batch["tokens"].shape[-1]
    cut = length // 2
    first = np.arange(length) < cut
    early = batch | {"mask": batch["mask"] * first.astype(np.float32)}
    changed = early | {
        "tokens": np.where(first, batch["tokens"], _others(batch["tokens"], setup.config))
    }
    yield _equal(names[0], loss(early), loss(changed), SAME)
    if "segment_ids" not in batch:
        why = "documents are not kept apart: data.packing=stream"
        yield from (Witness(name, None, why) for name in names[1:])
        return
    two = batch | _two_documents(batch, cut)
    tokens = np.where(first, _others(batch["tokens"], setup.config), batch["tokens"])
    yield _equal(names[1], loss(two), loss(two | {"tokens": tokens}), SAME)
    turned = {name: np.roll(two[name], -cut, -1) for name in ("tokens", "targets", "mask")}
    yield _equal(names[2], loss(two), loss(two | turned), MOVED_DOCUMENT)


def _evaluated(reference: Reference) -> Callable[[HostBatch], float]:
    """Returns the mean loss of a batch without noise, at the weights after one step."""
    setup = reference.stepper.setup
    evaluate = make_eval_step(setup).jitted
    params = placed_state(setup, reference.states[1]).params

    def loss(batch: HostBatch) -> float:
        here = {name: jnp.asarray(x) for name, x in batch.items()}
        total, number = evaluate(params, here)
        return float(total) / max(float(number), 1.0)

    return loss


def _others(tokens: np.ndarray, config: RunConfig) -> np.ndarray:
    """Replaces each token by another one."""
    return ((tokens + 1) % config.vocab).astype(tokens.dtype)


def _two_documents(batch: HostBatch, cut: int) -> HostBatch:
    """Splits each sequence into two documents of `cut` tokens, with a loss only on the second."""
    shape = batch["tokens"].shape
    at = np.arange(shape[-1])
    segments = np.broadcast_to((at >= cut).astype(np.int32) + 1, shape)
    positions = np.broadcast_to((at % cut).astype(np.int32), shape)
    mask = np.broadcast_to((at >= cut).astype(np.float32), shape)
    return {"segment_ids": segments, "positions": positions, "mask": mask}


def _equal(name: str, one: float, other: float, tolerance: float) -> Witness:
    holds = abs(one - other) <= tolerance * abs(one)
    return Witness(name, holds, f"losses {one:.7g}, {other:.7g}")


def _masked(reference: Reference) -> Witness:
    batch = reference.batches[0]
    nothing = batch | {"mask": np.zeros_like(batch["mask"])}
    _, figures = reference.stepper.take(reference.states[0], nothing)
    loss = figures.numbers["loss"]
    wrong = [str(leaf) for leaf, x in _gradients(figures).items() if np.any(x)]
    return Witness(MASKED, loss == 0 and not wrong, ", ".join(wrong[:3]))


def _gradients(figures: Figures) -> dict[Leaf, np.ndarray]:
    return {leaf: x for leaf, x in figures.arrays.items() if leaf.kind == GRADIENT}


def _gradients_of_loss(setup: Setup, figures: Figures) -> dict[Leaf, np.ndarray]:
    """Returns the gradients but those of the biases that routers choose by, which hold loads."""
    parameters = setup.model.parameters
    gradients = _gradients(figures)
    return {leaf: x for leaf, x in gradients.items() if not parameters[leaf.path].is_load_bias}


# The gradient, and what follows from it


def slope_witness(reference: Reference) -> Witness:
    """Compares the gradient with Richardson's finite differences of the loss in four directions."""
    name = "the gradient is the slope of the loss"
    stepper, plain, batch = reference.stepper, reference.states[1], reference.batches[1]
    optimizer = stepper.setup.config.optimizer
    derived = any(rule.gradient_point for rule in stepper.setup.update_rules.values())
    if derived and not isinstance(optimizer, ScheduleFreeAdamW):
        return Witness(name, None, "the gradient is taken at a point that the step derives")
    # A schedule-free gradient is taken at a point of which the average is a share.
    share = optimizer.beta1 if isinstance(optimizer, ScheduleFreeAdamW) else 1.0
    if stepper.setup.config.precision.compute != "float32":
        return Witness(name, None, "in float32 alone")
    if stepper.setup.config.model.has_jumps:
        return Witness(name, None, "a router chooses otherwise as weights move: the loss jumps")
    of_loss = _gradients_of_loss(stepper.setup, reference.figures[1])
    gradients = {leaf.path: x for leaf, x in of_loss.items()}
    random = np.random.default_rng(0)
    worst = 0.0
    losses = _losses(stepper.setup)
    for _ in range(4):
        along = {path: _direction(x, random) for path, x in gradients.items()}
        slope = share * sum(float((gradients[path] * x).sum()) for path, x in along.items())
        difference = _difference(stepper, plain, batch, along, losses)
        worst = max(worst, abs(difference - slope) / max(abs(slope), 1e-30))
    return Witness(name, worst < SLOPE, f"off by {worst:.0e} of it")


def _losses(setup: Setup) -> list[str]:
    """Returns the names of the figures whose sum a step minimises."""
    find = make_gradients(setup)
    _, sums = jax.eval_shape(find, setup.state.params, jnp.int32(0), setup.batch)
    return minimised(sums, parts_of(setup.config))


def _direction(gradient: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns a random direction that leans towards the gradient, so that rounding does not hide
    the slope.
    """
    drawn = random.standard_normal(gradient.shape)
    lean = gradient / max(norm(gradient), 1e-30) * random.uniform(0.5, 1)
    return drawn / norm(drawn) / 2 + lean


def _difference(
    stepper: Stepper,
    plain: Plain,
    batch: HostBatch,
    along: dict[str, np.ndarray],
    losses: Sequence[str],
) -> float:
    def at(far: float) -> float:
        moved = dict(plain)
        for path, x in along.items():
            weight = plain[Leaf(WEIGHT, path)]
            moved[Leaf(WEIGHT, path)] = (weight.astype(np.float64) + far * x).astype(weight.dtype)
        numbers = stepper.take(moved, batch)[1].numbers
        return sum(numbers[name] for name in losses)

    step = 3e-3
    near = (at(step) - at(-step)) / (2 * step)
    far = (at(2 * step) - at(-2 * step)) / (4 * step)
    return (4 * near - far) / 3


def _rate(reference: Reference, own: Own) -> Witness:
    name = "the learning rate is that of the schedule"
    config = reference.stepper.setup.config
    if own.replaces("learning_rate", config):
        return Witness(name, None, "the schedule is the caller's")
    got = [figures.numbers["learning_rate"] for figures in reference.figures]
    steps = max(config.train.steps, len(got))
    want = [rate_of(config.optimizer, config.train.steps, at) for at in range(steps)]
    # The steps of the certificate may all be warm-up: the others are taken from the last state.
    for at in range(len(got), len(want)):
        _, figures = _at_step(reference, at)
        got.append(figures.numbers["learning_rate"])
    wrong = [
        f"step {at + 1}: {ours:g}, not {theirs:g}"
        for at, (ours, theirs) in enumerate(zip(got, want, strict=True))
        if abs(ours - theirs) > RATE * theirs + 1e-12
    ]
    return Witness(name, not wrong, ", ".join(wrong))


def _at_step(reference: Reference, number: int) -> tuple[Plain, Figures]:
    """Takes the 0-based step `number` from the last state, on the first batch.

    Returns that state with this number, and the figures of the step.
    """
    step = Leaf("step")
    before = reference.states[-1]
    at = np.full_like(before[step], number)
    before = before | {step: at}
    return before, reference.stepper.take(before, reference.batches[0])[1]


def rate_of(optimizer: OptimizerConfig, steps: int, step: int) -> float:
    """Returns the learning rate of the 0-based `step`, computed from the documented schedules."""
    peak, last, warmup = optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if optimizer.schedule == "constant":
        return peak
    begin = warmup
    if optimizer.decay_share is not None:
        begin = max(warmup, steps - 1 - max(1, round(optimizer.decay_share * steps)))
    share = min(max((step - begin) / max(steps - 1 - begin, 1), 0.0), 1.0)
    height = 0.5 * (1 + math.cos(math.pi * share)) if optimizer.schedule == "cosine" else 1 - share
    return last + (peak - last) * height


def update_witness(reference: Reference, own: Own) -> Witness:
    """Compares how weights move with the optimizer in float64, fed the recorded gradients."""
    name = "weights move as the optimizer says, from these gradients"
    setup = reference.stepper.setup
    optimizer = setup.config.optimizer
    known = not own.replaces("optimizer", setup.config) and not optimizer.groups
    if not known or not isinstance(optimizer, AdamW | ScheduleFreeAdamW):
        return Witness(name, None, "known for adamw and schedule_free_adamw without groups alone")
    if setup.config.precision.params != "float32":
        return Witness(name, None, "in float32 alone")
    worst, where = 0.0, ""
    followed: dict[Leaf, Adam | ScheduleFree] = {}
    # After the last step the rate of the first one follows, so that a rate that rose also falls.
    steps = [*zip(reference.states, reference.figures, strict=False), _at_step(reference, 0)]
    for at, (before, figures) in enumerate(steps):
        clipped, sound = _clipped(setup, figures)
        if not sound:
            return Witness(name, False, f"step {at + 1}: grad_norm is not that of the gradients")
        for leaf, gradient in clipped.items():
            weight = before[Leaf(WEIGHT, leaf.path)].astype(np.float64)
            own_rate = setup.update_rules[leaf.path].rate  # 1 without model.mup_base
            dims = weight.ndim - setup.model.parameters[leaf.path].apart  # of a layer
            last_name = leaf.path.rpartition(".")[2]
            decays = dims >= 2 and not any(word in last_name for word in WITHOUT_DECAY)
            if leaf not in followed:
                decay = optimizer.weight_decay / own_rate
                of_weight = optimizer.model_copy(update={"weight_decay": decay})
                followed[leaf] = follow(of_weight, weight, decays)
            rate = own_rate * figures.numbers["learning_rate"]
            want = followed[leaf].moved(gradient, weight, rate)
            got = figures.arrays[Leaf(WEIGHT, leaf.path)]
            stored = 3 * rounding_of(np.dtype("float32")) * norm(weight)
            off = (norm(got - want) - stored) / max(norm(want), 1e-30)
            worst, where = max((worst, where), (off, leaf.path))
    return Witness(name, worst < UPDATE, f"off by {worst:.0e} {where}".rstrip())


def _clipped(setup: Setup, figures: Figures) -> tuple[dict[Leaf, np.ndarray], bool]:
    """Returns clipped gradients, and True if the reported norm is that before clipping."""
    gradients = _gradients_of_loss(setup, figures)
    whole = math.sqrt(sum(norm(x) ** 2 for x in gradients.values()))
    sound = abs(whole - figures.numbers["grad_norm"]) <= 1e-5 * whole
    limit = setup.config.train.clip
    scale = 1.0 if limit is None else min(1.0, limit / max(whole, 1e-30))
    return {leaf: x * scale for leaf, x in gradients.items()}, sound


def _average(reference: Reference) -> Witness:
    name = "the average follows the new weights"
    config = reference.stepper.setup.config
    if not config.optimizer.ema:
        return Witness(name, None, "the run keeps none")
    steps = pairwise(reference.states)
    offs = [off for both in steps for _, off in averages_off(config, *both)]
    worst = max(offs, default=0.0)
    return Witness(name, worst < AVERAGE, f"off by {worst:.0e} of the weights")


def averages_off(config: RunConfig, before: Plain, after: Plain) -> Iterator[tuple[Leaf, float]]:
    """Yields how far a step leaves the average of each weight from where the new weight moves it,
    as a share of the weight.
    """
    decay = config.optimizer.ema
    for leaf, x in before.items():
        if leaf.kind != EMA or decay is None:
            continue
        average = x.astype(np.float64)
        weight = after[Leaf(WEIGHT, leaf.path)].astype(np.float64)
        moved = after[leaf].astype(np.float64) - average
        yield leaf, norm(moved - (1 - decay) * (weight - average)) / max(norm(weight), 1e-30)
