"""A caller's optimizer does what optax does with all tensors of the model, layer by layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches_of, mesh_of, tiny

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.models.abstract import Parameter
from spmdtrain.pipeline.stage_layout import lay_out
from spmdtrain.train.updates import optimizers

SHAPES = {
    "blocks.layer.up": Parameter((3, 4, 5), ("layer", "embed", "ffn")),
    "blocks.layer.scale": Parameter((3, 4), ("layer", "norm")),
    "norm.scale": Parameter((4,), ("norm",)),
    "tokens.table": Parameter((7, 4), ("vocab", "embed")),
}
LAYERS = lay_out(3, 1, 1)
matrices = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
by_path = {path: "norm" in path for path in SHAPES}

OF_ONE_TENSOR = {
    "adam": optax.scale_by_adam(),
    "adaptive clip": optax.adaptive_grad_clip(0.01),
    "block clip": optax.clip_by_block_rms(0.1),
    "centralize": optax.centralize(),
    "trust ratio": optax.scale_by_trust_ratio(),
    "ema": optax.ema(0.9),
    "zero nans": optax.chain(optax.zero_nans(), optax.trace(0.9)),
    "inject": optax.inject_hyperparams(optax.scale_by_adam)(b1=0.8),
    "masked decay": optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(0.1, mask=matrices)
    ),
    "every second": optax.MultiSteps(
        optax.scale_by_adam(), every_k_schedule=2
    ).gradient_transformation(),
}
OF_ALL = {
    "clip": optax.clip_by_global_norm(0.1),
    "a clip that seldom acts": optax.chain(optax.clip_by_global_norm(1e6), optax.scale_by_adam()),
    "clip, then layer by layer": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.trace(0.9),
        optax.scale_by_trust_ratio(),
        optax.add_decayed_weights(0.1, mask=matrices),
    ),
    "norm of the update": optax.normalize_by_update_norm(),
    "skip bad": optax.apply_if_finite(optax.scale_by_adam(), 5),
    "clip inside": optax.masked(optax.clip_by_global_norm(0.1), matrices),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.scale_by_adam()),
    "by path": optax.add_decayed_weights(0.1, mask=by_path),
    "prodigy": optax.chain(optax.contrib.prodigy(), optax.scale(-1.0)),
    "labels": optax.multi_transform(
        {True: optax.scale_by_lion(), False: optax.chain(optax.clip(0.1), optax.trace(0.9))},
        lambda tree: {path: by_path[path] for path in tree},
    ),
    "a clip that begins later": optax.conditionally_transform(
        optax.clip_by_global_norm(0.1), lambda step, **_: step >= 4
    ),
    "the largest norm so far": optax.GradientTransformation(
        lambda _: (jnp.zeros(()), jnp.zeros((), jnp.int32)),
        lambda tree, state, _: (
            jax.tree.map(lambda x: jnp.where(state[1] > 3, x / (1 + state[0]), x), tree),
            (jnp.maximum(state[0], optax.tree.norm(tree)), state[1] + 1),
        ),
    ),
    "injected clip": optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=0.1),
    "every second, all finite": optax.MultiSteps(
        optax.scale_by_adam(), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
}

LATE = ("a clip that begins later", "the largest norm so far")
FINITE = (*LATE, "prodigy")  # after a NaN, nothing is left to compare
OF_ONE_TENSOR["later"] = optax.conditionally_transform(
    optax.scale_by_adam(), lambda step, **_: step >= 4
)


def tensors(seed: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    return {path: jnp.asarray(draw.normal(size=x.shape), jnp.float32) for path, x in SHAPES.items()}


def parted(tree: dict) -> dict:
    """Each layer's tensor for itself, as a model without a stack has them."""
    return {
        path: tuple(x[at] for at in range(3)) if SHAPES[path].stacked else x
        for path, x in tree.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("name", [*OF_ONE_TENSOR, *OF_ALL])
def test_an_optimizer_of_optax_does_what_optax_does_with_all_tensors(name):
    transformation = (OF_ONE_TENSOR | OF_ALL)[name]
    rules = optimizers.choose_update_rules(transformation, SHAPES, LAYERS)
    assert all((rule.together is None) == (name in OF_ONE_TENSOR) for rule in rules.values())
    values = tensors(0)
    state, want_state = optimizers.init(rules, SHAPES, values), transformation.init(parted(values))
    last = 7 if name in LATE else 4
    for step in range(1, last):
        gradients = tensors(step)
        if step == 2 and name not in FINITE:
            gradients["norm.scale"] = gradients["norm.scale"].at[0].set(jnp.nan)
        got, state = optimizers.updates(rules, SHAPES, gradients, state, values)
        want, want_state = transformation.update(parted(gradients), want_state, parted(values))
        for path, x in parted(got).items():
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), x, want[path]
            )
        if name in FINITE:
            values = {path: x - got[path] for path, x in values.items()}
    stacks = {leaf.shape[:1] for leaf in jax.tree.leaves(state["blocks.layer.up"])}
    assert stacks <= {(3,)}, "states rest with their layers"


REFUSED = {
    "needs a value": (optax.contrib.reduce_on_plateau(), "missing.*value"),
    "needs pairs": (
        optax.lookahead(optax.sgd(0.1), 5, 0.5),
        "optimizer= cannot update all parameters",
    ),
    "clip and a rate": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "holds a learning rate",
    ),
    "a clip for each": (lambda *_: optax.clip_by_global_norm(1.0), "train.clip=1.0"),
    "sam": (
        optax.chain(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), optax.scale(-1.0)),
        "optimizer= holds optax.contrib.sam: .*; try the optimizer inside it",
    ),
    "schedule free": (
        lambda *_: optax.contrib.schedule_free_adamw(0.1),
        "optax.contrib.schedule_free: .*; try --set optimizer.name=schedule_free_adamw",
    ),
    "of each example": (
        optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)),
        "optax.contrib.differentially_private_aggregate: .* gradient of each example",
    ),
    "another shape": (
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x.sum(-1), g)),
        "for blocks.layer.up of shape .* it gives one of shape",
    ),
    "noise of one array": (
        optax.GradientTransformation(
            lambda x: jnp.zeros(x.shape),
            lambda g, s, _: (g + jax.random.normal(jax.random.key(0), g.shape), s),
        ),
        "optimizer= draws random numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_in_a_line(name):
    optimizer, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said) as caught:
        optimizers.choose_update_rules(optimizer, SHAPES, LAYERS)
    assert "\n" not in str(caught.value)


def test_groups_that_share_a_transformation_are_clipped_together():
    clip = optax.clip_by_global_norm(0.1)
    rules = optimizers.choose_update_rules(
        lambda path, _: None if path == "norm.scale" else optimizers.Rule(clip, rate=0.5),
        SHAPES,
        LAYERS,
    )
    values = tensors(0)
    found, _ = optimizers.updates(
        rules, SHAPES, values, optimizers.init(rules, SHAPES, values), values
    )
    assert found.keys() == SHAPES.keys() - {"norm.scale"}
    assert float(optax.tree.norm(found)) == pytest.approx(0.1, rel=1e-5)


def losses(transformation, *mesh: str) -> list[float]:
    """Of three steps."""
    config = tiny("optimizer.warmup=0", *mesh).with_vocab(61)
    setup = st.shard(config, devices=jax.devices()[: mesh_of(mesh)], optimizer=transformation)
    state, step, found = st.init_state(setup), st.make_step(setup), []
    with batches_of(setup) as ahead:
        for _ in range(3):
            state, metrics = step(state, next(ahead))
            found.append(float(metrics["loss"]))
    return found


@pytest.mark.long
def test_it_is_the_same_on_any_mesh():
    clip = optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9))
    want = losses(clip)
    zero = ("mesh.data=2", "mesh.tensor=2", "train.zero=1", "train.microbatch=2")
    np.testing.assert_allclose(losses(clip, *zero), want, rtol=1e-5)


@pytest.mark.long
def test_it_is_the_same_in_a_pipeline():
    clip = optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9))
    want = losses(clip)
    stages = ("mesh.pipeline=2", "mesh.fsdp=2", "train.microbatch=2")
    np.testing.assert_allclose(losses(clip, *stages), want, rtol=1e-5)
    assert losses(optax.trace(0.9))[-1] != pytest.approx(want[-1], rel=1e-4), "nothing was clipped"


@pytest.mark.seconds
def test_a_pipeline_refuses_what_it_could_not_do():
    staged = {"blocks.up": Parameter((1, 2, 1, 4), ("chunk", "stage", "layer", "ffn"))}
    layer_by_layer = optax.chain(optax.clip_by_global_norm(0.1), optax.scale_by_trust_ratio())
    for optimizer in (optax.add_noise(0.1, 0.5, 0), layer_by_layer):
        with pytest.raises(ConfigError, match=re.escape("mesh.pipeline=1")):
            optimizers.choose_update_rules(optimizer, staged, lay_out(2, 2, 1))
    with pytest.raises(ConfigError, match="train.clip"):
        optimizers.choose_update_rules(optax.clip_by_global_norm(0.1), staged, lay_out(1, 2, 1))
