"""Runs with experts on a mesh against one device: with its routing given, and with their own.

Two experts may be so close to each other that the order of a sum decides which is chosen: a flip.
With the experts of each token given, nothing is left to that order.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_oracle import logits
from helpers import batches_of, initial_weights, prepared
from jax.sharding import PartitionSpec as P

from spmdtrain.models.layers.router import Router
from spmdtrain.running.compile_step import lower_step
from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup

STEPS, LAYERS, SEQUENCES, TOKENS, CHOSEN = 20, 2, 16, 8, 3
TINY = (
    *("model.name=llama", "model.embed=16", "model.heads=2", "model.vocab=32"),
    *(f"model.layers={LAYERS}", f"train.sequence_length={TOKENS}", "optimizer.warmup=0"),
    f"train.global_batch={SEQUENCES}",
    *("model.experts.count=8", f"model.experts.chosen={CHOSEN}", "model.experts.ffn=16"),
    *("optimizer.name=sgd", "optimizer.learning_rate=0.3", "model.experts.balance=0.1"),
    # Too little to change a number: it brings the noise of each sample, which identifies it.
    "model.experts.jitter=1e-12",
)
EXPERT_DATA_FSDP = ("mesh.expert=2", "mesh.data=2", "mesh.fsdp=2", "train.zero=1")
MESHES = {
    "expert 2 data 2 fsdp 2": EXPERT_DATA_FSDP,
    "expert 2 context 2 tensor 2": (
        *("mesh.expert=2", "mesh.context=2", "mesh.tensor=2"),
        "rules.parameters.experts=expert,tensor",
    ),
    "expert 2 context 2 pipeline 2": (
        *("mesh.expert=2", "mesh.context=2", "mesh.pipeline=2"),
        *("train.microbatch=2", "pipeline.schedule=zero_bubble"),
    ),
}
SLOW = set(MESHES) - {"expert 2 data 2 fsdp 2"}
ROUTER = "blocks.layer.mlp.router.weight_ex"
# A router's weights times this differ by about as much as rounding does.
CLOSE = 1e-6

Choose = Callable[..., jax.Array]
choose_freely = Router._choose


class Run(NamedTuple):
    losses: np.ndarray
    params: list[dict[str, np.ndarray]]  # before each step, and after the last one


def compiled(choose: Choose, placement: tuple[str, ...] = ()) -> tuple[Setup, Any]:
    """(setup, step) of a run whose routers choose by `choose`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_choose", choose)
        setup = prepared(*TINY, *placement)
        return setup, lower_step(setup).compile()


def run(setup: Setup, step: Any, scale: float) -> Run:
    """Trains from the weights of one device, those of routers times `scale`."""
    weights = initial_weights(*TINY)
    weights = weights | {ROUTER: scale * weights[ROUTER]}
    state = replace(init_state(setup), params=placed_arrays(setup, weights))
    losses, params = [], [weights]
    with batches_of(setup) as ahead:
        for _ in range(STEPS):
            state, metrics = step(state, next(ahead))
            losses.append(float(metrics["loss"]))
            params.append(plain_arrays(setup, jax.device_get(state.params)))
    return Run(np.array(losses), params)


class Recorded(NamedTuple):
    """The experts of each sequence in each layer and step of one device, by its noise there."""

    run: Run
    ids: dict[bytes, np.ndarray]

    def choose(self, *given: Any) -> jax.Array:
        """Chooses what was chosen then: in place of `Router._choose`."""
        ctx = given[-1]
        known = jnp.asarray(np.stack([np.frombuffer(key, np.uint32) for key in self.ids]))
        ids_ntk = jnp.asarray(np.stack(list(self.ids.values())))
        noise_b = jax.random.key_data(ctx.noise_b)
        row_b = (noise_b[:, None] == known).all(-1).argmax(1)
        return ctx.as_tokens(ids_ntk[row_b])


@cache
def recorder() -> tuple[Setup, Any, dict[bytes, np.ndarray]]:
    """(setup, step, ids) on one device; a step adds what its routers chose to the ids."""
    ids: dict[bytes, np.ndarray] = {}

    def note(noise_b, ids_btk) -> None:
        ids.update(zip(map(bytes, np.asarray(noise_b)), np.asarray(ids_btk), strict=True))

    # jax 0.10 has no callbacks where more than one axis is automatic.
    @partial(jax.shard_map, axis_names={"context", "tensor"}, in_specs=P(), out_specs=P())
    def noted(noise_b, ids_btk) -> jax.Array:
        jax.debug.callback(note, noise_b, ids_btk)
        return ids_btk

    def choose(router: Router, scores_btx, bias_x, ctx) -> jax.Array:
        ids_btk = choose_freely(router, scores_btx, bias_x, ctx)
        return noted(jax.random.key_data(ctx.noise_b), ids_btk)

    return *compiled(choose), ids


@cache
def recorded(scale: float) -> Recorded:
    setup, step, ids = recorder()
    ids.clear()
    on_one_device = run(setup, step, scale)
    jax.effects_barrier()
    assert len(ids) == STEPS * LAYERS * SEQUENCES
    return Recorded(on_one_device, dict(ids))


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MESHES]
)
def test_with_the_routing_of_one_device_a_run_trains_as_on_one_device(mesh):
    """Where experts are as close as rounding: without a condition."""
    wanted = recorded(CLOSE)
    found = run(*compiled(wanted.choose, MESHES[mesh]), CLOSE)
    for what, off in apart(found, wanted.run).items():
        assert off <= 1e-5, f"{what}: {off}"


def apart(found: Run, wanted: Run) -> dict[str, float]:
    """Returns by what two runs differ: their losses, and each parameter at the end, relative."""
    return {"losses": float(np.max(np.abs(found.losses / wanted.losses - 1)))} | {
        path: float(np.max(np.abs(found.params[-1][path] - x)) / max(np.max(np.abs(x)), 1e-6))
        for path, x in wanted.params[-1].items()
    }


@pytest.mark.long
def test_a_run_that_routes_by_itself_trains_as_on_one_device_until_a_choice_flips():
    wanted = recorded(1.0).run
    found = run(*compiled(choose_freely, EXPERT_DATA_FSDP), 1.0)
    what, off = max(apart(found, wanted).items(), key=lambda each: each[1])
    if off > 1e-5:
        pytest.fail(f"{what} off by {off:.1e}; {flips(found, wanted)}")


def flips(found: Run, wanted: Run) -> str:
    """Names the first choice that two runs made differently, and its gap."""
    setup = prepared(*TINY)
    with batches_of(setup) as ahead:
        for step in range(len(found.losses)):
            tokens = jax.device_get(next(ahead))["tokens"].reshape(-1, TOKENS)
            ours, theirs = ([], [])
            for each, routed in ((found, ours), (wanted, theirs)):
                logits(setup.config.model, each.params[step], tokens, routed)
            for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                differs = ((mine[2] > 0) != (other[2] > 0)).any(-1)
                if differs.any():
                    b, t = np.argwhere(differs)[0]
                    best = np.sort(other[0][b, t])
                    gap = best[-CHOSEN] - best[-CHOSEN - 1]
                    return f"flip: step {step}, layer {layer}, token {t} of sequence {b}, {gap:.1e}"
    return "no choice flipped: something else is wrong"


@pytest.mark.seconds
def test_a_flip_is_named():
    weights = initial_weights(*TINY)
    other = weights | {ROUTER: weights[ROUTER].copy()}
    other[ROUTER][1, :, 0] += 1.0
    one = np.ones(1)
    text = flips(Run(one, [other]), Run(one, [weights]))
    assert text.startswith("flip: step 0, layer 1, token ")
    assert flips(Run(one, [weights]), Run(one, [weights])).startswith("no choice flipped")
