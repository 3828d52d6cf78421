"""A model whose layers have different mixers: the same on every mesh as on one device, with a cache
as without, and known to the planner.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_gradients_of_one_device, gradients, initial_weights, prepared, tiny

from spmdtrain.config.errors import ConfigError, UserError
from spmdtrain.config.schema.model.layer_kinds import LayerParts, shortest_round
from spmdtrain.config.schema.model.segments import shortest_segments
from spmdtrain.inference.sample import Choice, make_generate
from spmdtrain.models.abstract import build_model
from spmdtrain.models.choose import choose_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.counted_flops import counted_flops_per_token
from spmdtrain.models.layers import empty_cache
from spmdtrain.models.segments import Segments
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.models.stack import Stack
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.flops import model_flops_per_token

KEY = jax.random.key(0)
SIZES = ("key_heads=2", "value_heads=4", "key_dim=8", "value_dim=6", "taps=3")
DELTA = tuple(f"model.delta.{size}" for size in SIZES)
SMALL = ("model.embed=16", "model.heads=2", "model.vocab=32", "train.sequence_length=12")
ROUNDS = (*DELTA, "model.layers=4", "model.mixers=['delta', 'attention']", "model.name=llama")
EXPERTS = ("model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=16")
OTHERS = ("model.ssd.heads=4", "model.ssd.head_dim=6", "model.ssd.state=8", "model.conv.taps=3")
SSD = ("model.ssd.heads=4", "model.ssd.head_dim=16", "model.ssd.state=12", "model.ssd.groups=2")
MODELS = {
    "rounds": ROUNDS,
    "segments": (
        *DELTA,
        "model.layers=3",
        "model.mixers=['delta', 'delta', 'attention', 'delta']",
    ),
    "heads of two widths": (
        *("model.name=llama", "model.layers=4", "model.windows=5,0", "model.kv_heads=1"),
        *("model.full.head_dim=12", "model.full.kv_heads=2", "model.full.keys_are_values=true"),
        *("model.value_norm=true", "model.layer_scale=true", "model.query_norm=head"),
    ),
    "embeddings of layers": (
        *("model.name=llama", "model.layers=4", "model.token_layers.dim=6"),
        *("model.windows=5,0", "model.full.head_dim=12", "model.token_layers.vocab=40"),
    ),
    "shared keys": (
        *("model.name=llama", "model.layers=5", "model.windows=5,0", "model.shared_keys=2"),
        *("model.full.head_dim=12", "model.shared_ffn=40", "model.query_norm=head"),
    ),
    "state spaces and convolutions": (
        *OTHERS,
        "model.layers=3",
        "model.mixers=['ssd', 'conv', 'attention']",
    ),
    "one part": (
        *SSD,
        "model.layers=4",
        "model.mixers=['ssd', 'none']",
        "model.mlps=['none', 'mlp']",
    ),
    "one part, with experts": (
        *SSD,
        *EXPERTS,
        "model.layers=5",
        "model.mixers=['ssd', 'none', 'attention', 'none', 'ssd']",
        "model.mlps=['none', 'mlp', 'none', 'experts', 'none']",
        "model.mlp=relu2",
        "model.norm_places=both",
        *("model.experts.width=8", "model.experts.shared=1", "model.experts.shared_ffn=24"),
    ),
    "two mixers": (
        *SSD,
        *("model.mlp_gate_factor=1.5", "model.mlp_out_factor=0.5"),
        "model.layers=2",
        "model.mixers=['both']",
        "model.both.in_factor=1.5",
        "model.both.out_factor=0.5",
        "model.windows=[5, 0]",
        "model.name=llama",
    ),
    "no attention": (*SSD, "model.layers=2", "model.mixers=['ssd', 'none']"),
    "rounds with experts": (
        *ROUNDS,
        *EXPERTS,
        "model.experts.first_dense=1",
        "model.layers=3",
        "model.mixers=['delta', 'delta', 'attention']",
    ),
}
WITHOUT_STAGES = "data 2 fsdp 2 tensor 2"
MESHES = {
    WITHOUT_STAGES: ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1"),
    "pipeline 2 tensor 2": ("mesh.pipeline=2", "mesh.tensor=2", "train.microbatch=2"),
}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("aaaa", "a"), ("abab", "ab"), ("aba", "aba"), ("aabaab", "aab"), ("", "")],
)
def test_a_round_repeats_as_a_whole(layers, expected):
    assert shortest_round(layers) == tuple(expected)


def test_layers_are_named_by_what_they_have():
    model = tiny(*MODELS["rounds with experts"]).model
    assert model.stacks[0].pattern == (LayerParts("delta", "mlp"),)
    assert [layer.mixer for layer in model.stacks[1].pattern] == ["delta", "attention"]
    assert all(layer.mlp == "experts" for layer in model.stacks[1].pattern)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.mixers=['delta']",), "needs the table"),
        (DELTA, "read by no layer"),
        ((*OTHERS, "model.mixers=['ssd', 'attention']"), r"\[model.conv\] is read by no layer"),
        (
            (*DELTA, "model.mixers=['delta', 'mamba']"),
            "mixers='mamba' .* must be 'attention'",
        ),
        (("model.mixers=['both']",), r"needs the table \[model.ssd\]"),
        (("model.both.in_factor=2",), r"\[model.both\] is read by no layer"),
        (("model.mixers=none", "model.mlps=['mlp', 'none']"), "layer 1 has neither"),
        (("model.mlps=['experts']",), r"needs the table \[model.experts\]"),
        ((*EXPERTS, "model.mlps=['mlp']"), r"\[model.experts\] is read by no layer"),
        (
            (*EXPERTS, "model.mlps=['mlp', 'experts']", "model.experts.first_dense=1"),
            "both say which layers have experts",
        ),
        (
            (*OTHERS, "model.mixers=['ssd', 'conv']", "model.ssd.factors=[2.0]"),
            "has 1 numbers; set 5",
        ),
    ],
)
def test_mixers_without_a_table_and_tables_without_a_layer_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny(*settings)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("aaaba", [("a", 3), ("ba", 1)]),
        ("ab" * 5 + "b", [("ab", 5), ("b", 1)]),
        ("aab" * 3 + "ab" * 4, [("a", 1), ("aba", 3), ("ba", 3), ("b", 1)]),
        ("ab", [("ab", 1)]),
    ],
)
def test_segments_repeat_patterns_of_few_layers(layers, expected):
    segments = shortest_segments(tuple(layers))
    assert _written(segments) <= _written([(tuple(pattern), n) for pattern, n in expected])
    assert "".join("".join(pattern) * rounds for pattern, rounds in segments) == layers


def _written(segments):
    return sum(len(pattern) for pattern, _ in segments), len(segments)


def test_no_division_into_segments_has_fewer_layers_to_write_out():
    draw = np.random.default_rng(3)
    for _ in range(30):
        layers = tuple(draw.integers(0, 2, draw.integers(1, 10)).tolist())
        written, _ = _written(shortest_segments(layers))
        assert written == _fewest(layers)


def _fewest(layers):
    """The layers of the patterns of the best division, by trying all."""
    if not layers:
        return 0
    return min(
        size + _fewest(layers[size * rounds :])
        for size in range(1, len(layers) + 1)
        for rounds in range(1, len(layers) // size + 1)
        if layers[:size] * rounds == layers[: size * rounds]
    )


def test_segments_of_equal_layers_draw_noise_of_their_own():
    x = jnp.ones((1, 4, 8))
    ctx = ForwardContext(jnp.arange(4)[None], dropout_rate=0.5, noise_b=jax.random.split(KEY, 1))
    stacks = [Stack(Dropped, 1, nnx.Rngs(0)) for _ in range(2)]
    of_one, _ = Segments(stacks[:1])(x, ctx)
    of_both, _ = Segments(stacks)(x, ctx)
    assert not np.array_equal(of_both - of_one, of_one - x)


class Dropped(nnx.Module):
    """Adds what dropout leaves of ones."""

    def __init__(self, _: nnx.Rngs): ...

    def __call__(self, x, ctx):
        return x + ctx.dropout(jnp.ones_like(x), 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *(("rounds", mesh) for mesh in MESHES),
        ("segments", WITHOUT_STAGES),
        *((model, mesh) for model in ("one part", "two mixers") for mesh in MESHES),
    ],
)
def test_gradients_on_a_mesh_are_those_of_one_device(model, mesh):
    assert_gradients_of_one_device(MODELS[model], MESHES[mesh], 1e-5)


def test_a_pipeline_over_segments_is_refused():
    with pytest.raises(UserError, match="rounds"):
        initial_weights(*SMALL, *MODELS["segments"], "mesh.pipeline=2", "train.microbatch=2")


@pytest.mark.seconds
@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_with_a_cache_gives_the_logits_of_the_whole(name):
    config = tiny(*SMALL, *MODELS[name])
    model = build_model(*choose_model(config))
    params = jax.tree.map(jnp.asarray, initial_weights(*SMALL, *MODELS[name]))
    tokens_bt = np.random.default_rng(0).integers(0, config.vocab, (2, 12))

    @jax.jit
    def extend(tokens_bt, cache):
        positions = cache.length + jnp.arange(tokens_bt.shape[1])
        ctx = ForwardContext(jnp.broadcast_to(positions, tokens_bt.shape))
        return model.bind(params).extend(tokens_bt, ctx, cache)

    whole, _ = extend(tokens_bt, empty_cache(config.model, (2, 12)))
    logits, cache = extend(tokens_bt[:, :5], empty_cache(config.model, (2, 12)))
    for at in range(5, 12):
        logits, cache = extend(tokens_bt[:, at : at + 1], cache)
    np.testing.assert_allclose(logits, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["state spaces and convolutions", "rounds with experts"])
def test_prompts_of_three_lengths_in_a_batch_are_continued_as_each_alone(name):
    setup = prepared(*SMALL, *MODELS[name])
    params = jax.tree.map(jnp.asarray, initial_weights(*SMALL, *MODELS[name]))
    random = np.random.default_rng(0)
    prompts = [random.integers(0, setup.config.vocab, length) for length in (2, 4, 7)]
    # One program for each number of prompts.
    generate = make_generate(setup, 4, Choice(0), shapes=lambda *_: (2, 11))
    in_a_batch = generate(params, prompts, KEY)
    for prompt, ids in zip(prompts, in_a_batch, strict=True):
        (alone,) = generate(params, [prompt], KEY)
        assert np.array_equal(ids[: len(prompt)], prompt)
        assert np.array_equal(ids, alone)


@pytest.mark.seconds
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_a_layer_of_a_round_is_recomputed_by_itself(remat):
    """A whole round would keep the activations of all its layers at once."""
    numbers = (*SMALL, *MODELS["rounds"], "train.remat=none")
    _, expected = gradients(numbers)
    _, recomputed = gradients(numbers, (f"train.remat={remat}",))
    for path, gradient in expected.items():
        np.testing.assert_allclose(recomputed[path], gradient, rtol=1e-4, atol=1e-7)
    setup = prepared(*numbers, f"train.remat={remat}")
    jaxpr = jax.make_jaxpr(_forward(setup))(setup.state.params)
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    blocks = [
        eqn
        for eqn in loop.params["jaxpr"].eqns
        if eqn.primitive.name.startswith(("remat", "checkpoint"))
    ]
    assert len(blocks) == len(setup.config.model.stacks[0].pattern)
    # Each waits for the gradient of its output: XLA would recompute all of them at once.
    assert all(block.params["prevent_cse"] for block in blocks)


def _forward(setup):
    def forward(params):
        module = setup.model.bind(params)
        ctx = ForwardContext(jnp.arange(12)[None], remat=setup.config.train.remat)
        return module.blocks(jnp.ones((1, 12, 16)), ctx)[0]

    return forward


@pytest.mark.long
def test_adapters_of_mixers_have_the_gradients_of_one_device_on_a_mesh():
    numbers = (*SMALL, *MODELS["rounds"], "finetune.kind=dora", "finetune.rank=2")
    _, expected = gradients(numbers)
    _, on_mesh = gradients(numbers, MESHES[WITHOUT_STAGES])
    assert on_mesh.keys() == expected.keys()
    for path, gradient in expected.items():  # 0 for each A, because B is
        assert np.linalg.norm(on_mesh[path] - gradient) <= 1e-5 * np.linalg.norm(gradient), path


@pytest.mark.parametrize("name", ["rounds", "state spaces and convolutions"])
def test_every_matmul_of_a_mixer_has_an_adapter(name):
    config = tiny(*SMALL, *MODELS[name], "finetune.kind=lora")
    parameters = build_model(*choose_model(config)).parameters
    of_matmuls = {path for path, one in parameters.items() if one.is_of_matmuls}
    adapted = {path.rsplit(".", 2)[0] for path in of_matmuls if path.endswith(".a")}
    assert {path for path in of_matmuls if not path.endswith(".a")} == adapted


@pytest.mark.parametrize(
    ("targets", "meant"),
    [
        ("in_proj_qkv,in_proj_z", "q,k,v,in_proj_z"),
        ("q,o_proj", "q,out"),
        ("all-linear", "q,k,v,out,z,rate,decay,up,down"),
        ("nothing", "decay,down,k,out,q,rate,up,v,z"),
    ],
)
def test_names_of_published_layers_are_told_as_ours(targets, meant):
    numbers = (*SMALL, *DELTA, "model.mixers=['delta', 'attention']", "model.layers=4")
    config = tiny(*numbers, "finetune.kind=lora", f"finetune.targets={targets}")
    with pytest.raises(ConfigError, match=f"finetune.targets={meant}(\n|$)"):
        build_model(*choose_model(config))


@pytest.mark.parametrize("name", MODELS)
def test_the_planner_knows_parameters_and_flops(name):
    config = tiny(*SMALL, *MODELS[name], "train.sequence_length=128")
    model = build_model(*choose_model(config))
    assert shape.parameters(config.model) == model.size
    counted = counted_flops_per_token(config, model)
    assert train_flops_per_token(config.model, 128) == pytest.approx(counted, rel=0.02)
    assert model_flops_per_token(config.model, 128) == pytest.approx(counted, rel=0.02)
