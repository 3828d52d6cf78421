"""Optimizers see one layer's tensor, decay acts on matrices, the schedule hits its corners,
clipping is global.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches_of, prepared, tiny, trained

from spmdtrain.config import AdamW, ConfigError, Sgd
from spmdtrain.config.schema import Adafactor, Lamb, Lion, Muon, ParameterGroup
from spmdtrain.models.abstract import Parameter
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_step
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.learning_rates import learning_rate
from spmdtrain.train.updates.shipped_optimizers import (
    BUILDERS,
    is_matrix,
    make_optimizer,
    shipped_update_rules,
)

SHAPES = {
    "blocks.layer.up": Parameter((3, 4, 5), ("layer", "embed", "ffn")),
    "blocks.layer.up_bias": Parameter((3, 1, 5), ("layer", None, "ffn")),
    "blocks.layer.scale": Parameter((3, 4), ("layer", "norm")),
    "tokens.table": Parameter((7, 4), ("vocab", "embed")),
}
DECAYED = {"blocks.layer.up", "tokens.table"}


def draw(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        path: jax.random.normal(key, p.shape)
        for key, (path, p) in zip(keys, SHAPES.items(), strict=True)
    }


RULES = [
    AdamW(),
    AdamW(weight_decay=0.3),
    Lion(),
    Lion(weight_decay=0.3),
    Sgd(),
    Sgd(weight_decay=0.3),
    Sgd(momentum=0.0),
]


@pytest.mark.seconds
@pytest.mark.parametrize("config", RULES, ids=repr)
def test_directions_equal_optax_on_the_whole_tree_with_a_decay_mask(config):
    params, mask = draw(0), {path: path in DECAYED for path in SHAPES}
    decay = optax.add_decayed_weights(config.weight_decay, mask)
    reference = {
        "adamw": lambda: optax.chain(
            optax.scale_by_adam(config.beta1, config.beta2, config.epsilon), decay
        ),
        "lion": lambda: optax.chain(optax.scale_by_lion(config.beta1, config.beta2), decay),
        "sgd": lambda: optax.chain(decay, optax.trace(config.momentum)),
    }[config.name]()
    rules = shipped_update_rules(config, SHAPES)
    state, want_state = optimizers.init(rules, SHAPES, params), reference.init(params)
    for step in range(3):
        got, state = optimizers.updates(rules, SHAPES, draw(step + 1), state, params)
        want, want_state = reference.update(draw(step + 1), want_state, params)
        for path in SHAPES:
            np.testing.assert_allclose(got[path], want[path], rtol=1e-6, atol=1e-6)


def by_layer(reference, path: str, steps: int = 3) -> list[np.ndarray]:
    """The updates that `reference(shape)` gives each layer of a stacked tensor on its own."""
    found = []
    for layer in range(SHAPES[path].shape[0]):
        weights = draw(0)[path][layer]
        rule = reference(weights.shape)
        state = rule.init(weights)
        for step in range(steps):
            update, state = rule.update(draw(step + 1)[path][layer], state, weights)
        found.append(np.asarray(update))
    return found


def updates_of(config, steps: int = 3) -> dict[str, jax.Array]:
    rules = shipped_update_rules(config, SHAPES)
    state = optimizers.init(rules, SHAPES, draw(0))
    for step in range(steps):
        found, state = optimizers.updates(rules, SHAPES, draw(step + 1), state, draw(0))
    return found


@pytest.mark.seconds
def test_adafactor_is_that_of_optax_layer_by_layer():
    """With the learning rate and the sign left out, and no factors: its tensors are small."""
    reference = lambda _: optax.adafactor(1.0, weight_decay_rate=0.3)  # noqa: E731
    got = updates_of(Adafactor(weight_decay=0.3))["blocks.layer.up"]
    for ours, theirs in zip(got, by_layer(reference, "blocks.layer.up"), strict=True):
        np.testing.assert_allclose(ours, -theirs, rtol=1e-5)


def test_adafactor_keeps_a_row_and_a_column_of_a_large_matrix():
    shapes = {"w": Parameter((2, 256, 384), ("layer", "embed", "ffn"))}
    rules = shipped_update_rules(Adafactor(), shapes)
    state = jax.eval_shape(
        lambda w: optimizers.init(rules, shapes, {"w": w}), jnp.zeros((2, 256, 384))
    )
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state))
    assert sizes[-2:] == [2 * 256, 2 * 384] and sum(sizes[:-2]) <= 8


@pytest.mark.seconds
def test_lamb_is_that_of_optax_for_matrices_layer_by_layer_and_adamw_for_the_rest():
    config = Lamb(weight_decay=0.3)
    got = updates_of(config)
    reference = lambda _: optax.lamb(  # noqa: E731
        1.0, config.beta1, config.beta2, config.epsilon, weight_decay=0.3
    )
    for ours, theirs in zip(
        got["blocks.layer.up"], by_layer(reference, "blocks.layer.up"), strict=True
    ):
        np.testing.assert_allclose(ours, -theirs, rtol=1e-5)
    adamw = updates_of(AdamW(beta2=config.beta2, epsilon=config.epsilon))
    for path in ("blocks.layer.up_bias", "blocks.layer.scale"):
        np.testing.assert_allclose(got[path], adamw[path], rtol=1e-6)


def test_muon_orthogonalises_matrices_of_layers_and_is_adamw_for_the_rest():
    got = updates_of(Muon(weight_decay=0.3))
    adamw = updates_of(AdamW(weight_decay=0.3))
    for path in ("blocks.layer.up_bias", "blocks.layer.scale", "tokens.table"):
        np.testing.assert_allclose(got[path], adamw[path], rtol=1e-6)
    plain = updates_of(Muon())["blocks.layer.up"]
    for layer in range(3):
        decayed = plain[layer] + 0.3 * draw(0)["blocks.layer.up"][layer]
        np.testing.assert_allclose(got["blocks.layer.up"][layer], decayed, rtol=1e-5, atol=1e-6)
        singular = np.linalg.svd(plain[layer], compute_uv=False) / (0.2 * 5**0.5)
        assert (singular > 0.5).all() and (singular < 1.5).all(), singular


def jordan(gradients: list[np.ndarray], beta: float, corrected: bool) -> list[np.ndarray]:
    """The updates of Muon as its author writes them (kellerjordan.github.io/posts/muon), float64.

    He scales by sqrt(max(1, rows / columns)), which is left out here. `corrected`: both parts of
    the Nesterov momentum are divided by what their weights add up to, as in Adam; optax does so.
    """
    momentum = np.zeros_like(gradients[0])
    found = []
    for step, gradient in enumerate(gradients, 1):
        momentum = beta * momentum + (1 - beta) * gradient
        of_momentum = 1 - beta ** (step + 1) if corrected else 1
        of_gradient = 1 - beta**step if corrected else 1
        x = beta * momentum / of_momentum + (1 - beta) * gradient / of_gradient
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
            b = -4.7750 * a + 2.0315 * a @ a
            x = 3.4445 * x + (b @ x if x.shape[0] <= x.shape[1] else x @ b)
        found.append(x)
    return found


def test_muon_is_that_of_its_author_but_for_the_weights_of_the_first_steps():
    """Ours is scaled to the size of AdamW's updates, and its momentum is corrected for its start.

    The first step is the same. In those after it a gradient counts a little less than the author
    has it, by (1 - beta^(n + 1)) / (1 - beta^n) at step n, which soon is 1.
    """
    shapes = {"w": Parameter((1, 6, 10), ("layer", "embed", "ffn"))}
    rules = shipped_update_rules(Muon(), shapes)
    value = {"w": jnp.zeros((1, 6, 10))}
    state = optimizers.init(rules, shapes, value)
    drawn = np.random.default_rng(0).normal(size=(120, 6, 10))
    take = jax.jit(lambda given, state: optimizers.updates(rules, shapes, given, state, value))
    ours = []
    for gradient in drawn:
        update, state = take({"w": jnp.asarray(gradient[None], jnp.float32)}, state)
        ours.append(np.asarray(update["w"][0]) / (0.2 * 10**0.5))
    beta = Muon().momentum
    np.testing.assert_allclose(ours, jordan(list(drawn), beta, corrected=True), atol=2e-4)
    author = jordan(list(drawn), beta, corrected=False)
    off = [np.abs(x - y).max() for x, y in zip(ours, author, strict=True)]
    assert off[0] < 2e-4 and off[1] > 1e-2 and off[-1] < 2e-2


@pytest.mark.seconds
def test_muon_takes_a_tensor_of_more_dims_as_the_matrix_from_the_stream_to_the_rest():
    axes = ("layer", "kv_heads", None, "embed")
    tensor = {"out": Parameter((2, 2, 3, 4), axes)}
    experts = {"out": Parameter((1, 2, 6, 4), ("layer", "experts", "ffn", "embed"))}
    matrix = {"out": Parameter((2, 6, 4), ("layer", "ffn", "embed"))}
    gradient = jax.random.normal(jax.random.key(0), (2, 6, 4))

    def update(shapes):
        rules = shipped_update_rules(Muon(), shapes)
        given = {"out": gradient.reshape(shapes["out"].shape)}
        found, _ = optimizers.updates(
            rules, shapes, given, optimizers.init(rules, shapes, given), given
        )
        return found["out"].reshape(2, 6, 4)

    np.testing.assert_allclose(update(tensor), update(matrix), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(update(experts), update(matrix), rtol=1e-5, atol=1e-6)


def test_groups_have_rates_and_decays_of_their_own_and_frozen_ones_have_no_state():
    groups = [
        {"match": "tokens.*", "frozen": True},
        {"match": "*.up", "rate": 0.1, "weight_decay": 0.5},
        {"match": "blocks.*", "rate": 3.0},
    ]
    config = AdamW(weight_decay=0.3, groups=groups)
    rules = shipped_update_rules(config, SHAPES)
    assert {path: rule.rate for path, rule in rules.items()} == {
        "blocks.layer.up": 0.1,
        "blocks.layer.up_bias": 3.0,
        "blocks.layer.scale": 3.0,
    }
    plain = updates_of(AdamW())
    got = updates_of(config)
    decayed = plain["blocks.layer.up"] + 0.5 * draw(0)["blocks.layer.up"]
    np.testing.assert_allclose(got["blocks.layer.up"], decayed, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["blocks.layer.scale"], plain["blocks.layer.scale"], rtol=1e-6)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [{"match": "token.*"}],
            "no parameter matches 'token.*'; try a pattern of paths such as tokens.table",
        ),
        ([{"match": "*", "frozen": True}], "freezes all 4 parameters"),
    ],
)
def test_a_group_that_cannot_be_meant_is_one_line(groups, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        shipped_update_rules(AdamW(groups=groups), SHAPES)


def test_a_frozen_group_has_no_rate():
    with pytest.raises(ValueError, match="is frozen; its rate has no effect"):
        AdamW(groups=[{"match": "*", "frozen": True, "rate": 2.0}])


@pytest.mark.seconds
def test_a_run_of_groups_leaves_frozen_weights_alone():
    group = {"match": "tokens.*", "frozen": True}
    config = tiny("train.steps=2")
    optimizer = config.optimizer.model_copy(update={"groups": (ParameterGroup(**group),)})
    setup = shard(
        config.model_copy(update={"optimizer": optimizer}).with_vocab(64), devices=jax.devices()[:1]
    )
    state = init_state(setup)
    before = jax.device_get(state.params)
    with batches_of(setup) as ahead:
        state, _ = make_step(setup)(state, next(ahead))
    after = jax.device_get(state.params)
    unchanged = {path for path in before if np.array_equal(before[path], after[path])}
    assert unchanged == {"tokens.table_ve"} == before.keys() - state.opt_state.keys()


@pytest.mark.seconds
def test_a_layerwise_rule_sees_one_layers_tensor():
    """A trust ratio on the stack would mix the norms of the layers; per layer it must equal layer
    by layer.
    """

    def updated(shapes, params, grads):
        rules = dict.fromkeys(shapes, optimizers.Rule(optax.scale_by_trust_ratio()))
        return optimizers.updates(
            rules, shapes, grads, optimizers.init(rules, shapes, params), params
        )[0]

    params, grads = draw(0), draw(1)
    got = updated(SHAPES, params, grads)
    path, rule = "blocks.layer.up", optax.scale_by_trust_ratio()
    for layer in range(3):
        want, _ = rule.update(
            grads[path][layer], rule.init(params[path][layer]), params[path][layer]
        )
        np.testing.assert_allclose(got[path][layer], want, rtol=1e-6)
    staged = {path: SHAPES[path]} | {
        "staged": Parameter((3, 2, 2, 5), ("chunk", "stage", "layer", "ffn")),
        "experts": Parameter((3, 2, 2, 5), ("layer", "experts", "embed", "ffn")),
    }
    params, grads = (
        x | dict.fromkeys(("staged", "experts"), x[path].reshape(3, 2, 2, 5))
        for x in (params, grads)
    )
    laid_out = updated(staged, params, grads)
    for place in np.ndindex(3, 2, 2):
        weights = params["staged"][place]
        want, _ = rule.update(grads["staged"][place], rule.init(weights), weights)
        np.testing.assert_allclose(laid_out["staged"][place], want, rtol=1e-6)
    for place in np.ndindex(3, 2):
        weights = params["experts"][place]
        want, _ = rule.update(grads["experts"][place], rule.init(weights), weights)
        np.testing.assert_allclose(laid_out["experts"][place], want, rtol=1e-6)
    whole, _ = rule.update(grads[path], rule.init(params[path]), params[path])
    assert not np.allclose(got[path], whole, rtol=1e-3), "the test could not tell the two apart"


def test_only_matrices_decay():
    assert {path for path, p in SHAPES.items() if is_matrix(path, p)} == DECAYED
    real = prepared().model.parameters
    kept = {path for path, p in real.items() if not is_matrix(path, p)}
    assert kept == {path for path in real if "norm" in path or "bias" in path}
    taps = Parameter((3, 2, 5, 4), ("layer", "kv_heads", "head_dim", None))
    assert is_matrix("mixer.in_ehn", taps) and not is_matrix("mixer.taps_hnw", taps)


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.6, 0.2), ("cosine", 0.6, 0.2)],
)
def test_the_learning_rate_rises_over_the_warmup_and_ends_at_the_final_rate(schedule, middle, last):
    config = AdamW(learning_rate=1.0, final_learning_rate=0.2, schedule=schedule, warmup=10)
    rate = lambda step: float(learning_rate(config, 111, jnp.int32(step)))  # noqa: E731
    assert 0 < rate(0) < rate(5) < rate(9) < rate(10) == 1.0
    assert rate(60) == pytest.approx(middle, abs=1e-6)
    assert rate(110) == pytest.approx(last, abs=1e-6)


def test_wsd_stays_and_falls_in_the_last_steps():
    config = AdamW(
        learning_rate=1.0, final_learning_rate=0.2, schedule="wsd", warmup=10, decay_share=0.3
    )
    rate = lambda step: float(learning_rate(config, 101, jnp.int32(step)))  # noqa: E731
    assert rate(0) == pytest.approx(1 / 11)
    assert rate(10) == rate(40) == rate(70) == 1.0
    assert rate(71) < 1.0
    assert rate(85) == pytest.approx(0.6, abs=1e-6)
    assert rate(100) == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_wsd_ends_at_the_final_rate_however_few_steps_there_are(steps):
    config = AdamW(learning_rate=1.0, final_learning_rate=0.2, schedule="wsd")
    rates = [float(learning_rate(config, steps, jnp.int32(step))) for step in range(steps)]
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0.2, abs=1e-6)


def test_a_share_that_no_schedule_reads_is_refused():
    with pytest.raises(ValueError, match="decay_share belongs to schedule 'wsd', not to 'cosine'"):
        AdamW(decay_share=0.3)


def test_clipping_scales_all_gradients_by_one_factor_to_the_global_norm():
    grads = draw(2)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in grads.values()))
    clipped, before = optimizers.clip(grads, 0.5)
    assert float(before) == pytest.approx(norm, rel=1e-6)
    for path in grads:
        np.testing.assert_allclose(clipped[path], grads[path] * 0.5 / norm, rtol=1e-5)
    small, _ = optimizers.clip(grads, 10 * norm)
    assert all(np.array_equal(small[path], grads[path]) for path in grads)
    assert optimizers.clip(grads, None)[0] is grads


def leaves_of(tree) -> list[tuple[str, tuple, str]]:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in named]


@pytest.mark.parametrize("kind", BUILDERS, ids=lambda kind: kind.__name__)
def test_the_state_has_the_same_leaves_whatever_the_values(kind):
    """A run goes on with another decay, momentum or epsilon: what it kept is found again by
    name.
    """
    configs = [kind(), kind(weight_decay=0.3)]
    if "momentum" in kind.model_fields:
        configs.append(kind(momentum=0.0))
    states = [
        leaves_of(optimizers.init(shipped_update_rules(config, SHAPES), SHAPES, draw(0)))
        for config in configs
    ]
    assert states[0] and all(state == states[0] for state in states)


@pytest.mark.parametrize("config", [kind() for kind in BUILDERS], ids=lambda config: config.name)
def test_the_settings_say_how_many_moments_there_are(config):
    """The planner counts by them: elements of the state for an element of a large parameter."""
    shapes = {"w": Parameter((1000, 1000), ("embed", "ffn"))}
    choose = make_optimizer(config)
    rules = {"w": choose("w", shapes["w"])}
    state = jax.eval_shape(
        lambda w: optimizers.init(rules, shapes, {"w": w}), jnp.zeros((1000, 1000))
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) // 1000**2 == config.moments


@pytest.mark.seconds
@pytest.mark.parametrize(
    "layout", [(), ("mesh.pipeline=2", "mesh.data=2", "train.zero=1", "train.microbatch=2")]
)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("params", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_step_gives_back_the_state_it_was_given(layout, name, params, accumulate, compute):
    """Shapes and dtypes of every leaf, in every precision: traced, not run."""
    precision = (
        f"precision.params={params}",
        f"precision.accumulate={accumulate}",
        f"precision.compute={compute}",
    )
    setup = prepared(*layout, f"optimizer.name={name}", *precision)
    step = make_step(setup)
    batch = setup.batch
    with jax.set_mesh(setup.mesh):
        state, _ = jax.eval_shape(step, setup.state, batch)
    assert leaves_of(state) == leaves_of(setup.state)
    held = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state))} - {
        jnp.dtype("int32")
    }
    assert held == {jnp.dtype(params)}, (
        "weights and moments are as precise as precision.params says"
    )


def test_the_norm_of_narrow_gradients_is_as_exact_as_of_wide_ones():
    wide = {
        "a": jax.random.normal(jax.random.key(0), (300, 300)),
        "b": jax.random.normal(jax.random.key(1), (77,)),
    }
    narrow = {path: g.astype(jnp.bfloat16) for path, g in wide.items()}
    exact = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in narrow.values()))
    clipped, norm = jax.jit(optimizers.clip, static_argnums=1)(narrow, 1.0)
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    after = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in clipped.values()))
    assert after == pytest.approx(1.0, rel=1e-3), "but for the rounding of each gradient"


@pytest.mark.long
@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon", "soap"])
def test_a_layerwise_optimizer_is_the_same_on_one_device_and_split_in_every_way(name):
    """Their updates depend on whole tensors of one layer, or of one expert: on stacks, and on
    parts, they would be others.
    """
    numbers = (f"optimizer.name={name}", "optimizer.weight_decay=0.1", "model.layers=2")
    split = ("mesh.pipeline=2", "mesh.fsdp=2", "train.microbatch=2", "pipeline.chunks=1")
    if name == "soap":  # a side without a basis compiles in half the time
        numbers = (*numbers, "optimizer.basis_largest=64", "model.bias=false")
    if name == "muon":
        experts = ("model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=32")
        numbers, split = (*numbers, *experts), (*split, "mesh.expert=2")
    else:
        split = (*split, "mesh.tensor=2")
    want = trained(*numbers, steps=4)[0]
    got = trained(*numbers, *split, steps=4)[0]
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
