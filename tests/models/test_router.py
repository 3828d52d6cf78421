"""Routers: loads, side losses and the bias are those of numpy, on any mesh and accumulation."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family_config
from family_oracle import gates, logits
from flax import nnx
from helpers import batches_of, initial_weights, prepared

from spmdtrain.config.schema import ExpertsConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import expert_mlp
from spmdtrain.models.layers.router import Router, best_experts
from spmdtrain.train.compared.in_order import placed_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.step import make_gradients, make_step
from spmdtrain.train.updates.router_load import deviation_sign

RATE, BALANCE, Z_LOSS = 0.01, 0.5, 0.25
TINY = (
    *("model.name=llama", "model.embed=16", "model.heads=2", "model.vocab=32", "model.layers=4"),
    *("train.sequence_length=8", "train.global_batch=16", "optimizer.warmup=0"),
    *("model.experts.count=8", "model.experts.chosen=3", "model.experts.ffn=16"),
    *("model.experts.score=sigmoid", f"model.experts.bias_rate={RATE}"),
    *(f"model.experts.balance={BALANCE}", f"model.experts.z_loss={Z_LOSS}"),
)
PATTERN = ("model.experts.every=2",)
OVER_BATCH = (*PATTERN, "model.experts.balance_over=batch")
DATA_FSDP_EXPERT = ("mesh.data=2", "mesh.fsdp=2", "mesh.expert=2", "train.zero=1")
PLACEMENTS = {
    "over the batch": (OVER_BATCH, DATA_FSDP_EXPERT),
    "recomputed and accumulated": (
        PATTERN,
        ("mesh.context=2", "mesh.tensor=2", "train.remat=full", "train.microbatch=8"),
    ),
    "a padded pipeline": (
        ("model.layers=3",),
        ("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2"),
    ),
}


@cache
def first_batch(numbers: tuple[str, ...], placement: tuple[str, ...]) -> tuple:
    """(gradients, sums) of the first batch, from the weights of one device."""
    setup = prepared(*TINY, *numbers, *placement)
    step = jax.device_put(np.int32(0), setup.state.step.sharding)
    params = placed_arrays(setup, initial_weights(*TINY, *numbers))
    with batches_of(setup) as ahead:
        return jax.device_get(jax.jit(make_gradients(setup))(params, step, next(ahead)))


def in_order(setup: Setup, x: np.ndarray) -> np.ndarray:
    return np.asarray(setup.model.stage_layout.unstaged(x))


def bias_of(setup: Setup) -> str:
    (path,) = [path for path, each in setup.model.parameters.items() if each.is_load_bias]
    return path


@cache
def by_numpy(numbers: tuple[str, ...]) -> tuple[list, np.ndarray]:
    """((logits, scores, gates) of each layer with experts, [b, t, x], and the mask [b, t])."""
    setup = prepared(*TINY, *numbers)
    with batches_of(setup) as ahead:
        batch = jax.device_get(next(ahead))
    length = batch["tokens"].shape[-1]
    routed = []
    tokens, mask = (batch[name].reshape(-1, length) for name in ("tokens", "mask"))
    logits(setup.config.model, initial_weights(*TINY, *numbers), tokens, routed)
    return routed, mask


def counts_by_numpy(numbers: tuple[str, ...]) -> np.ndarray:
    """The tokens of each expert of each layer [l, x]."""
    routed, mask = by_numpy(numbers)
    return np.stack([(gates > 0)[mask > 0].sum(0) for _, _, gates in routed])


@pytest.mark.long
@pytest.mark.parametrize("case", PLACEMENTS)
def test_the_gradient_of_a_bias_is_the_number_of_tokens_of_each_expert(case):
    numbers, placement = PLACEMENTS[case]
    setup = prepared(*TINY, *numbers, *placement)
    gradients, sums = first_batch(numbers, placement)
    counted = in_order(setup, gradients[bias_of(setup)]) * sums["tokens"]
    wanted = counts_by_numpy(numbers)
    assert np.allclose(counted, wanted, rtol=1e-5)
    assert (wanted.sum(1) == 3 * sums["tokens"]).all()
    assert sums["expert_load"] == 0


@pytest.mark.seconds
@pytest.mark.parametrize("case", PLACEMENTS)
def test_side_losses_are_those_of_their_definition(case):
    """X sum(f P) of each sequence, or of all, and the square of the logarithm of the sum."""
    numbers, placement = PLACEMENTS[case]
    _, sums = first_batch(numbers, placement)
    routed, mask = by_numpy(numbers)
    balance = z_loss = entropy = 0.0
    for logits_btx, scores_btx, gates_btx in routed:
        share = scores_btx / scores_btx.sum(-1, keepdims=True)
        entropy += (-(share * np.log(share)).sum(-1) * mask).sum() / len(routed)
        z_loss += (np.log(np.exp(logits_btx).sum(-1)) ** 2 * mask).sum()
        groups = [slice(None)] if "batch" in numbers[-1] else [[row] for row in range(len(mask))]
        for rows in groups:
            weight = mask[rows][..., None]
            tokens = weight.sum()
            f = ((gates_btx[rows] > 0) * weight).sum((0, 1)) / (3 * tokens)
            p = (share[rows] * weight).sum((0, 1)) / tokens
            balance += tokens * 8 * (f * p).sum()
    assert sums["balance_loss"] == pytest.approx(BALANCE * balance, rel=1e-5)
    assert sums["router_z_loss"] == pytest.approx(Z_LOSS * z_loss, rel=1e-5)
    assert sums["router_entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.long
def test_a_step_moves_a_bias_by_its_own_rate_and_shows_the_loads():
    """Not by the learning rate, outside of the norm and of the average of the weights."""
    numbers, placement = PLACEMENTS["over the batch"]
    others = ("train.clip=0.001", "optimizer.ema=0.5", "optimizer.learning_rate=0.5")
    setup = prepared(*TINY, *numbers, *placement, *others)
    gradients, sums = first_batch(numbers, placement)
    bias = bias_of(setup)
    state = init_state(setup)
    assert bias not in state.items["ema"]
    with batches_of(setup) as ahead:
        after, metrics = jax.device_get(make_step(setup)(state, next(ahead)))
    counts = counts_by_numpy(numbers)
    wanted = -RATE * np.sign(counts - counts.mean(-1, keepdims=True))
    assert np.array_equal(in_order(setup, after.params[bias]), wanted.astype(np.float32))
    squares = [np.square(np.float64(g)).sum() for path, g in gradients.items() if path != bias]
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-5)
    loads = counts / counts.mean(-1, keepdims=True)
    assert metrics["expert_load"] == pytest.approx(loads.max(), rel=1e-6)
    assert metrics["expert_load_layer"] == 1 + 2 * loads.max(-1).argmax()
    share = np.maximum(loads / 8, 1e-30)
    evenness = (-share * np.log(share)).sum(-1).min() / np.log(8)
    assert metrics["expert_evenness"] == pytest.approx(evenness, rel=1e-5)


def test_a_group_that_is_left_out_does_not_win_over_negative_scores():
    experts = ExpertsConfig(count=8, chosen=2, groups=4, groups_kept=1)
    ranks = np.array([-0.5, -0.4, -0.3, -0.1, -0.9, -0.8, -0.2, -0.9], np.float32)
    assert sorted(np.asarray(best_experts(ranks[None, None], experts))[0, 0]) == [2, 3]


def test_a_router_rests_and_computes_in_float32():
    narrow = ("precision.params=bfloat16", "precision.compute=bfloat16")
    setup = prepared(*TINY, *PATTERN, *narrow)
    routers = {path for path in setup.state.params if "router" in path}
    assert len(routers) == 2
    for path, x in setup.state.params.items():
        assert x.dtype == ("float32" if path in routers else "bfloat16"), path
    used = jax.eval_shape(partial(setup.model.cast, dtype="bfloat16"), setup.state.params)
    assert {path for path, x in used.items() if x.dtype == "float32"} == routers


def test_loads_that_rounding_alone_tells_apart_are_equal():
    even = np.full(48, 100 / 3, np.float32)
    assert not np.any(deviation_sign(even))
    one_token = even + np.eye(48, dtype=np.float32)[0] * 1e-3
    assert np.array_equal(deviation_sign(one_token), np.where(np.arange(48) == 0, 1, -1))


def small_router(dtype: str):
    """(Router with a bias of 7 and a little, parameters, a stream [2, 9, e] of this dtype)."""
    config = family_config("minimax_m2").model
    with nnx.use_eager_sharding(False):
        router = Router(config, nnx.Rngs(0))
    random = np.random.default_rng(3)
    router.load_bias_x[...] = jnp.asarray(7 + 0.03 * random.standard_normal(8), jnp.float32)
    router.weight_ex[...] = jnp.asarray(0.01 * random.standard_normal(router.weight_ex.shape))
    x_bte = jnp.asarray(random.standard_normal((2, 9, config.embed)), dtype)
    return config, router, x_bte


def routed(router, x_bte):
    return router(x_bte, ForwardContext(jnp.zeros(x_bte.shape[:2], jnp.int32)))


@pytest.mark.parametrize("bias", [0.0, 5.0, -5.0])
def test_a_bias_chooses_and_is_in_no_gate_however_large_it_is(bias):
    config, router, x_bte = small_router("bfloat16")
    router.load_bias_x[...] = router.load_bias_x[...] + bias * (jnp.arange(8) % 3 == 0)
    found = routed(router, x_bte)
    p = {f"mlp.router.{name}": router_part for name, router_part in arrays_of(router).items()}
    _, _, wanted = gates(config, p, np.asarray(x_bte, np.float64))
    dense = np.zeros_like(wanted)
    np.put_along_axis(dense, np.asarray(found.ids_btk), np.asarray(found.gates_btk), -1)
    assert np.array_equal(dense > 0, wanted > 0)  # the same experts, from a stream in 16 bits
    np.testing.assert_allclose(dense, wanted, rtol=2e-6)


def arrays_of(router) -> dict[str, np.ndarray]:
    names = ("weight_ex", "load_bias_x")
    return {name: np.asarray(getattr(router, name)[...], np.float64) for name in names}


def test_a_router_multiplies_in_float32_in_both_directions():
    """Whatever the stream's type: in bfloat16 near scores change places."""
    _, router, x_bte = small_router("bfloat16")
    graph, state = nnx.split(router)

    def summed(state, x_bte):
        return routed(nnx.merge(graph, state), x_bte).gates_btk[..., 0].sum()

    traced = jax.make_jaxpr(jax.grad(summed, (0, 1)))(state, x_bte)
    products = [each for each in equations(traced.jaxpr) if each.primitive.name == "dot_general"]
    assert len(products) == 3  # forward, of the weight, of the stream
    for product in products:
        assert {str(operand.aval.dtype) for operand in product.invars} == {"float32"}


def equations(jaxpr):
    """The equations of a jaxpr, and of those inside of it."""
    for each in jaxpr.eqns:
        yield each
        for value in each.params.values():
            if inner := getattr(value, "jaxpr", None):
                yield from equations(inner)


def test_choices_whose_inputs_are_gated_are_summed_in_float32():
    """In bfloat16 1 + 1/512 is 1 again: of eight choices only the first would be left."""
    gates_btk = jnp.array([1] + 7 * [1 / 512]).reshape(1, 1, 8)
    x_bte = jnp.ones((1, 1, 4), jnp.bfloat16)

    def identity(gated_bte, _gate_bt1, _id_bt1):
        return gated_bte

    y_bte = expert_mlp._of_gated_inputs(identity, x_bte, gates_btk, jnp.zeros((1, 1, 8), int))
    assert y_bte.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(y_bte), 1 + 7 / 512, rtol=2**-8)
