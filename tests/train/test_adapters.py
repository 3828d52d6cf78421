"""Adapters of a frozen model: what they compute, on any mesh, and what is trained and kept."""

import zlib
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import MESHES_OF_WEIGHTS, batches_of, mesh_of, tiny, trained

import spmdtrain as st
from spmdtrain.config.errors import ConfigError
from spmdtrain.interop.peft.adapter_files import read_adapters
from spmdtrain.models.adapters.adapted import AdaptedWeight, Adapter, LinearPart
from spmdtrain.models.adapters.by_path import merged
from spmdtrain.models.adapters.quantised import dequantised
from spmdtrain.models.projection import MatmulWeight, Product
from spmdtrain.planner.cost.memory import SAFE_SHARE
from spmdtrain.planner.estimate import estimate
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.published.export_adapters import export_adapters
from spmdtrain.train.compared.in_order import plain_array, plain_arrays
from spmdtrain.train.external_arrays.state_from_weights import with_weights, with_wide_base
from spmdtrain.train.step import make_gradients

pytestmark = pytest.mark.long

MODEL = (
    "model.name=llama",
    "model.embed=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=24",
    "model.layers=2",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=8",
)
GATED = "model.output_gate=channel"  # one more half of what the adapter of q is for
SMALLEST = (
    *MODEL,
    GATED,
    "finetune.kind=dora",
    "finetune.rank=3",
    "finetune.dropout=0.25",
    "finetune.also_train=norm.*",
    "precision.frozen=bfloat16",
)
# What the test of meshes adds: all at once, because it compiles much.
OF_FEW_BITS = ("finetune.base=nf4",)


def setup_of(*settings: str) -> st.Setup:
    return st.shard(tiny(*SMALLEST, *settings), devices=jax.devices()[: mesh_of(settings)])


def moved(setup, params):
    """The parameters, those that are trained away from where they begin: b is zero there.

    On the host: nothing is compiled for it.
    """
    layout = setup.model.stage_layout
    trained, found = setup.model.split_trained(params)
    for path, x in trained.items():
        shape = setup.model.parameters[path].shape
        if setup.model.in_stack(path):
            shape = (layout.layers, *shape[len(layout.shape) :])
        noise = np.random.default_rng(zlib.crc32(path.encode())).standard_normal(shape, np.float32)
        if setup.model.in_stack(path):
            noise = noise.reshape(*layout.shape, *shape[1:])
        assert noise.shape == x.shape  # no layer and no weight is padded
        found[path] = jax.device_put(np.asarray(x) + np.float32(0.3) * noise, x.sharding)
    return found


@cache
def on_one_device(*settings: str) -> dict[str, np.ndarray]:
    """The parameters with which one device begins."""
    return jax.device_get(st.init_state(setup_of(*settings)).params)


def begun(setup, *of_model: str) -> dict[str, jax.Array]:
    """The parameters with which a mesh begins; a pipeline is given those of one device.

    The test of few bits makes them on a pipeline.
    """
    layout = setup.model.stage_layout
    if layout.stages == 1:
        return st.init_state(setup).params
    found = {}
    for path, x in on_one_device(*of_model).items():
        staged = x.reshape(*layout.shape, *x.shape[1:]) if setup.model.in_stack(path) else x
        found[path] = jax.device_put(staged, setup.state.params[path].sharding)
    return found


@cache
def first_batch(*settings: str) -> tuple[float, dict[str, np.ndarray]]:
    """(mean loss, gradients) of the first batch."""
    setup = setup_of(*settings)
    params = moved(setup, begun(setup, *OF_FEW_BITS))
    with batches_of(setup) as ahead:
        gradients = jax.jit(make_gradients(setup))(params, np.int32(0), next(ahead))
        found, sums = jax.device_get(gradients)
    return float(sums["loss"] / sums["tokens"]), plain_arrays(setup, found)


# These compile longest, and run with -m slow.
SLOW = ("collective matmuls", "zero bubble")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=pytest.mark.slow if each in SLOW else ())
        for each in MESHES_OF_WEIGHTS
    ],
)
def test_adapters_have_the_loss_and_gradients_of_one_device(layout):
    got, found = first_batch(*OF_FEW_BITS, *MESHES_OF_WEIGHTS[layout])
    want, wanted = first_batch(*OF_FEW_BITS)
    assert got == pytest.approx(want, rel=1e-6)
    assert found.keys() == wanted.keys()
    off = {path: np.linalg.norm(found[path] - wanted[path]) for path in wanted}
    size = {path: np.linalg.norm(wanted[path]) for path in wanted}
    assert np.linalg.norm([*off.values()]) <= 1e-6 * np.linalg.norm([*size.values()])
    # Attention hardly sees a change of all keys: what is left of their gradient is a difference.
    for path in wanted:
        assert off[path] <= 3e-6 * size[path], f"{path}: {off[path] / size[path]}"


def test_a_model_with_adapters_computes_what_the_merged_one_does():
    """On one device, where the gradients are those of the test above."""
    setup = setup_of("precision.frozen=float32", "finetune.dropout=0.0")
    of_adapters = [one for one in setup.model.parameters.values() if one.is_of_adapter]
    assert len(of_adapters) == 7 * 3
    also_trained = setup.model.parameters["norm.scale_e"].size
    assert setup.model.trained_size == also_trained + sum(one.size for one in of_adapters)
    params = moved(setup, st.init_state(setup).params)
    plain = st.shard(tiny(*MODEL, GATED), devices=jax.devices()[:1])
    weights = merged(jax.device_get(params), setup.config.finetune, setup.config.model)
    assert {path: x.shape for path, x in weights.items()} == {
        path: x.shape for path, x in plain.state.params.items()
    }
    with batches_of(plain) as ahead:
        batch = next(ahead)
        got = st.make_eval_step(setup)(params, batch)
        want = st.make_eval_step(plain)(weights, batch)
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-6)


def test_magnitudes_of_a_run_in_bfloat16_are_not_rounded():
    """Rounded ones would change a base before it learns anything."""
    setup = setup_of("precision.compute=bfloat16", "finetune.also_train=")
    magnitudes = [path for path in setup.model.parameters if path.endswith(".magnitude")]
    assert magnitudes
    assert {setup.model.dtype(path, "bfloat16") for path in magnitudes} == {"float32"}

    w, x, multiplied = adapted_by_magnitudes(setup)
    norms = jnp.linalg.norm(w.astype(jnp.float32), axis=0)
    base = np.asarray(x @ w, np.float64)
    np.testing.assert_array_equal(multiplied(x, norms), base)
    factors = np.random.default_rng(1).uniform(0.5, 1.5, 96)
    got = np.asarray(multiplied(x, norms * jnp.asarray(factors, jnp.float32)), np.float64)
    slopes = (got * base).sum(0) / (base * base).sum(0)
    # A rounded factor would be up to 4e-3 off. Those near 1 round back to it with the output.
    assert np.abs(slopes / factors - 1)[np.abs(factors - 1) > 0.05].max() < 1e-3


def test_the_gradient_of_magnitudes_keeps_no_activations_in_float32():
    w, x, multiplied = adapted_by_magnitudes(setup_of("precision.compute=bfloat16"))
    _, of_gradient = jax.vjp(multiplied, x, jnp.ones(w.shape[1]))
    kept = [each for each in jax.tree.leaves(of_gradient) if each.size >= len(x) * w.shape[1]]
    assert kept and {each.dtype for each in kept} == {jnp.dtype("bfloat16")}


def adapted_by_magnitudes(setup: st.Setup) -> tuple[jax.Array, jax.Array, Callable[..., jax.Array]]:
    """A weight [64, 96], a batch of its inputs, both in bfloat16, and (inputs, magnitudes) ->
    outputs of the weight with an adapter that changes nothing but magnitudes.
    """
    random = np.random.default_rng(0)
    drawn = (random.standard_normal(shape) for shape in ((64, 96), (64, 3), (512, 64)))
    w, a, x = (jnp.asarray(each, "bfloat16") for each in drawn)

    def multiplied(x: jax.Array, magnitude: jax.Array) -> jax.Array:
        adapter = Adapter(
            nnx.Param(a), nnx.Param(jnp.zeros((3, 96), w.dtype)), nnx.Param(magnitude)
        )
        adapted = AdaptedWeight(MatmulWeight(w), (LinearPart("up"),), setup.config.finetune, 0)
        adapted.up = adapter
        product = Product(lambda x, w, *_, **__: x @ w, ("ffn",), True, lambda x, *_: x)
        return adapted.multiply(product, x[None])[0]

    return w, x, multiplied


def test_a_run_begins_with_a_base_and_trains_adapters_alone(tmp_path):
    """It is then resumed on another mesh, and sampled; the base stays as it was, narrow.

    A pipeline reads it as well, whose steps are those of the test of meshes. Two layers have
    adapters: a part of a weight, and a whole one.
    """
    few = ("train.steps=2", "optimizer.warmup=0", "optimizer.schedule=constant")
    targets = ("finetune.targets=q,down", "model.output_gate=none")  # to be written for peft
    one = jax.devices()[:1]
    st.run(tiny(*MODEL, *few), tmp_path / "base", devices=one)
    base = st.weights(tmp_path / "base")
    asked = (*SMALLEST, *targets, *few, f"train.init_from={tmp_path / 'base'}", "optimizer.ema=0.5")
    st.run(tiny(*asked), tmp_path / "run", devices=one)
    longer = tiny(*asked, "train.steps=3", "mesh.fsdp=2")
    assert st.run(longer, tmp_path / "run", devices=jax.devices()[:2]).step == 3
    after = st.weights(tmp_path / "run")
    staged = setup_of(*targets, "optimizer.ema=0.5", *MESHES_OF_WEIGHTS["pipeline"])
    for path, x in st.restore(tmp_path / "run", staged).params.items():
        assert np.array_equal(plain_array(staged, path, x), after[path]), path
    added = after.keys() - base.keys()
    assert len(added) == 2 * 3  # a, b and magnitude of each
    for path, x in base.items():
        moves = path.startswith("norm.")
        assert after[path].dtype == (np.float32 if moves else ml_dtypes.bfloat16), path
        assert np.array_equal(after[path], x.astype(after[path].dtype)) != moves, path
    for path in added:
        if path.endswith(".b"):
            assert np.any(after[path]), path
    averages = st.weights(tmp_path / "run", ema=True)
    assert averages.keys() == after.keys()
    assert len(st.generate(tmp_path / "run", [1, 2, 3], 2)) == 5
    export_adapters(tmp_path / "run", tmp_path / "out", base="base")
    config = tiny(*asked)
    read = read_adapters(tmp_path / "out", after, config, "llama")
    assert read.keys() == added | {"norm.scale_e"}
    assert all(np.array_equal(x, after[path]) for path, x in read.items())
    with pytest.raises(st.UserError, match="finetune.rank"):
        st.run(tiny(*asked, "finetune.rank=2"), tmp_path / "run", devices=one)
    with pytest.raises(st.UserError, match="finetune.alpha"):
        st.run(tiny(*asked, "finetune.alpha=2.0"), tmp_path / "run", devices=one)


STAGED = ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1")


@cache
def wide_weights() -> dict[str, jax.Array]:
    """The weights of a model on a mesh, before it has adapters, which are those of one device."""
    wide = setup_of(*STAGED)
    params = st.init_state(wide).params
    for path, x in on_one_device(*OF_FEW_BITS).items():
        if path.endswith((".a", ".b")):
            assert np.array_equal(wide.model.stage_layout.unstaged(np.asarray(params[path])), x), (
                path
            )
    return {path: x for path, x in params.items() if not wide.model.parameters[path].is_of_adapter}


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_base_that_rests_in_few_bits_is_made_of_the_weights_that_are_given(base):
    """On a mesh where layers are staged and split; magnitudes are those of what is left."""
    setup = setup_of(f"finetune.base={base}", *STAGED)
    assert with_wide_base(setup).state.params.keys() >= wide_weights().keys()
    before = jax.device_get(wide_weights())
    params = jax.device_get(with_weights(setup, dict(wide_weights())).params)
    names = {"int8": ("integers", "scales"), "nf4": ("codes", "scales", "group_scales")}[base]
    for part, ins in (("attention.qkv_eknd", 1), ("attention.out_kgde", 3), ("mlp.down_fe", 1)):
        path = f"blocks.layer.{part}"
        arrays = {name: params[f"{path}.{name}"] for name in names}
        found = np.asarray(dequantised(arrays, base, ins, 3))
        want = before[path].astype(np.float32)
        off = np.linalg.norm(found - want) / np.linalg.norm(want)
        assert off < {"int8": 0.01, "nf4": 0.15}[base], path
    norms = np.linalg.norm(found, axis=-2)
    assert np.allclose(params[f"{path}.down.magnitude"], norms, rtol=1e-5)


def test_a_run_begins_with_one_that_is_quantised_alike(tmp_path):
    """With its adapters too, which another seed would draw differently; the rate changes nothing.

    What rests in other bits is refused: the weights that they were made of are gone.
    """
    asked = (
        *MODEL,
        "finetune.kind=lora",
        "finetune.targets=down",
        "finetune.base=int8",
        "train.steps=1",
        "optimizer.learning_rate=1e-30",
    )
    first = str(tmp_path / "first")
    st.run(tiny(*asked), first, devices=jax.devices()[:1])

    def begun_with_it(name: str, *settings: str) -> dict[str, np.ndarray]:
        config = tiny(*asked, f"train.init_from={first}", "train.seed=1", *settings)
        st.run(config, tmp_path / name, devices=jax.devices()[:1])
        return st.weights(tmp_path / name)

    want = st.weights(first)
    found = begun_with_it("alike")
    assert found.keys() == want.keys()
    for path, x in want.items():
        assert np.allclose(found[path], x, rtol=0, atol=1e-20), path
    line = f"{first}' holds quantised weights.*found finetune.base='int8'; try --set finetune.ba"
    for other in ("finetune.base=nf4", "finetune.base=float"):
        with pytest.raises(st.UserError, match=line):
            begun_with_it("other", other)
    with pytest.raises(st.UserError, match="finetune.rank"):
        begun_with_it("rank", "finetune.rank=2")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("finetune.targets=q_proj",),
            "'q_proj' is not a linear layer.*try --set finetune.targets=q",
        ),
        (("finetune.targets=",), "finetune.targets is empty"),
        (("finetune.kind=full",), "finetune.rank=3 only applies to adapters"),
        (("finetune.also_train=tokens",), "no weight has the path 'tokens'.*tokens.table_ve"),
        (("finetune.also_train=*.down_fe",), "down_fe, which has an adapter"),
        (
            ("model.mlp=gelu", "finetune.targets=gate"),
            "no such layer.*found down, k, out, q, up, v",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(settings, line):
    with pytest.raises(st.UserError, match=line):
        setup_of(*settings)


def test_a_dtype_of_frozen_weights_needs_some():
    with pytest.raises(st.UserError, match="no weight of this run is frozen"):
        st.shard(tiny(*MODEL, "precision.frozen=bfloat16"), devices=jax.devices()[:1])


def test_no_layer_keeps_the_frozen_weights_that_it_has_gathered():
    """Under fsdp, where the weights of all layers would be whole at once."""
    long = ("model.layers=8", "model.embed=128", "model.ffn=384", "precision.frozen=float32")
    small = (
        "finetune.kind=lora",
        "finetune.dropout=0.0",
        "mesh.fsdp=2",
        "train.global_batch=4",
        "train.microbatch=1",
    )
    setup = setup_of(*long, *small)
    parameters = setup.model.parameters.values()
    frozen = sum(4 * each.size for each in parameters if each.is_frozen)
    held = lower_step(setup).compile().memory_analysis().temp_size_in_bytes
    assert held < 0.6 * frozen  # 0.4; 1.4 where they are kept


def test_an_estimate_of_eight_billion_frozen_weights_takes_a_moment():
    """Llama 3 8B with adapters of rank 16: 16 GB of weights, where all trained are 128 GB."""
    asked = (
        "model.name=llama",
        "model.layers=32",
        "model.embed=4096",
        "model.heads=32",
        "model.kv_heads=8",
        "model.ffn=14336",
        "model.vocab=128256",
        "train.sequence_length=1024",
        "train.global_batch=8",
        "train.microbatch=1",
        "train.remat=full",
        "finetune.kind=lora",
        "precision.compute=bfloat16",
        "precision.frozen=bfloat16",
    )
    found = estimate(tiny(*asked), 1, "a100-40").memory
    adapters = 32 * 16 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert found.parameters == pytest.approx(2 * 8.03e9 + 4 * adapters, rel=1e-3)
    assert found.optimizer == pytest.approx(8 * adapters, rel=1e-3)
    assert found.total < 24e9 * SAFE_SHARE


def test_a_frozen_head_of_zeros_is_refused(tmp_path):
    """muP begins with it, and no gradient would ever pass it."""
    below = tmp_path / "frozen.toml"
    zeros = '[model]\nname = "gpt"\nvocab = 64\ntied = false\nmup_base = 16\n'
    head = '[[optimizer.groups]]\nmatch = "unembed*"\nfrozen = true\n'
    for text in (zeros + head, zeros + '[finetune]\nkind = "lora"\n'):
        below.write_text(text)
        with pytest.raises(ConfigError, match="no gradient passes it; set"):
            st.load(below)
        st.load(below, ["train.init_from=runs/base"])
        st.load(below, ["model.tied=true"])


def test_a_head_of_zeros_that_learns_is_none():
    more = ("finetune.kind=lora", "finetune.also_train=unembed_ve")
    tiny("model.tied=false", "model.mup_base=16", *more)


SMALL = (
    *("model.embed=16", "model.heads=2", "model.vocab=32", "finetune.kind=lora"),
    *("train.sequence_length=8", "train.global_batch=8", "optimizer.warmup=0"),
    "optimizer.learning_rate=0.1",
)
EXPERTS = ("model.experts.count=4", "model.experts.chosen=2")
STAGES = ("mesh.pipeline=2", "train.microbatch=4")
# Runs whose differences from one device had grown by 30 to 100 times a step.
GREW = {
    "experts, pipeline": (EXPERTS, STAGES),
    "experts, layers as a loop": (EXPERTS, ("train.scan_layers=true",)),
    "schedule-free, pipeline": (("optimizer.name=schedule_free_adamw",), STAGES),
}


@pytest.mark.long
@pytest.mark.parametrize(("model", "layout"), GREW.values(), ids=GREW)
def test_steps_differ_by_rounding_where_epsilon_exceeds_it(model, layout):
    """AdamW divides each gradient by its own size: one that is rounding alone takes a whole step.

    With an epsilon above these gradients nothing is left to grow, in any layout.
    """
    settings = (*SMALL, *model, "optimizer.epsilon=1e-2")
    losses, _, figures = trained(*settings, steps=6)
    here, _, ours = trained(*settings, *layout, steps=6)
    assert here == pytest.approx(losses, rel=2e-6)
    for mine, theirs in zip(ours, figures, strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
