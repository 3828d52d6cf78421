"""the shipped block is each of these families, by its settings: against the numpy of
family_oracle.py, in float32 on one device.
"""

import math
from functools import cache

import family_oracle
import jax
import jax.numpy as jnp
import mixer_oracle
import numpy as np
import pytest
from families import FAMILIES, RICH, VOCAB, T, draw_params, family_config, rich
from family_oracle import logits as logits_by_definition
from flax import nnx
from helpers import batches_of, prepared
from mixer_oracle import conv_layer, convolution, delta_layer, ssd_layer

from spmdtrain.config import ConfigError
from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import Attention, empty_cache
from spmdtrain.models.layers.rope import rotate
from spmdtrain.models.logits import logit_shape, logits_of
from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.step import make_gradients

TOLERANCE = 2e-6  # of the root of the mean square, relative; float32 itself makes 6e-7
# A norm of small outputs, with an epsilon of 1e-5 whatever the settings say, enlarges rounding.
TOLERANCES = {"olmo_hybrid": 1e-5, "kimi_linear": 4e-6}
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, T))


@cache
def made(name: str):
    """(config, model, parameters)."""
    config = family_config(name)
    model = build_model(config)
    params = draw_params(model, config.model.norm_offset)
    if config.model.mlp == "swiglu_clamped":  # values of the usual size never reach its clamp
        params = {path: x * (20 if path.endswith("up_xeu") else 1) for path, x in params.items()}
    return config, model, params


def apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_logits_of_its_definition(name):
    config, model, params = made(name)

    @jax.jit
    def run(params, tokens_bt):
        positions_bt = jnp.broadcast_to(jnp.arange(T), tokens_bt.shape)
        ctx = ForwardContext(positions_bt, ids_bt=tokens_bt)
        module = model.bind(params)
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        return logits_of(*module.head(x_bte, ctx), **logit_shape(config.model))

    got = np.asarray(run(params, TOKENS), np.float64)
    tolerance = TOLERANCES.get(name, TOLERANCE)
    assert apart(got, logits_by_definition(config.model, params, TOKENS)) <= tolerance


PLACEMENTS = [
    ("own", ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1")),
    ("own", ("mesh.context=4", "mesh.tensor=2", "train.microbatch=2")),
    ("sharing", ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.remat=full")),
    ("sharing", ("mesh.context=4", "mesh.tensor=2", "train.microbatch=2")),
    ("beside", ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2")),
    ("beside, sharing", ("mesh.expert=2", "mesh.fsdp=2", "mesh.tensor=2", "train.remat=full")),
    ("capped", ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1")),
    ("sunk", ("mesh.pipeline=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=4")),
    ("latent", ("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2")),
    ("latent", ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=2")),
    ("further", ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2")),
    ("chunked", ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2")),
    ("chunked", ("mesh.context=2", "mesh.data=2", "model.context_attention=ulysses")),
    ("chunked", ("mesh.context=4", "mesh.fsdp=2", "model.context_attention=gather")),
    ("convolved", ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2")),
    ("one part", ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2")),
    ("one part", ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=2")),
    ("side by side", ("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=2")),
]


def rich_gradients(name: str, *placement: str) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradients with layers in order) of the first batch, from drawn parameters."""
    setup = prepared(*rich(name, *placement))
    whole = prepared(*rich(name)).model
    drawn = jax.device_get(draw_params(whole, setup.config.model.norm_offset))
    step = jax.device_put(np.int32(0), setup.state.step.sharding)
    with batches_of(setup) as ahead:
        find = jax.jit(make_gradients(setup))
        found, sums = jax.device_get(find(placed_arrays(setup, drawn), step, next(ahead)))
    return float(sums["loss"] / sums["tokens"]), plain_arrays(setup, found)


@cache
def rich_gradients_of_one_device(name: str) -> tuple[float, dict[str, np.ndarray]]:
    return rich_gradients(name)


IDS = ["own", "own in a ring", "sharing", "sharing in a ring"]
IDS += ["beside", "beside, sharing", "capped"]
IDS += ["sunk", "latent", "staged", "further"]
IDS += ["ring of blocks", "ulysses", "gather", "convolved"]
IDS += ["one part", "one part in stages", "side by side"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "placement"), PLACEMENTS, ids=IDS)
def test_every_setting_has_the_gradients_of_one_device(name, placement):
    got_loss, got = rich_gradients(name, *placement)
    want_loss, want = rich_gradients_of_one_device(name)
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    assert got.keys() == want.keys()
    far = {path: apart(got[path], want[path]) for path in want}
    assert max(far.values()) <= 5e-6, far


@pytest.mark.parametrize("name", RICH)
@pytest.mark.seconds
def test_decoding_from_a_cache_has_the_logits_of_the_whole(name):
    """Six tokens at once, then one by one, beyond every window; against the definition."""
    setup = prepared(*rich(name))
    model, config = setup.model, setup.config
    params = draw_params(model, config.model.norm_offset)
    length = config.train.sequence_length
    tokens_bt = np.random.default_rng(2).integers(0, config.vocab, (2, length))
    want = logits_by_definition(config.model, params, tokens_bt)

    @jax.jit
    def extend(tokens_bt, cache):
        positions = cache.length + jnp.arange(tokens_bt.shape[1])
        ctx = ForwardContext(jnp.broadcast_to(positions, tokens_bt.shape))
        return model.bind(params).extend(tokens_bt, ctx, cache)

    cache = empty_cache(config.model, (2, length))
    start = 0
    for stop in range(6, length + 1):
        logits, cache = extend(tokens_bt[:, start:stop], cache)
        assert apart(np.asarray(logits, np.float64), want[:, stop - 1]) <= TOLERANCE, stop
        start = stop


@pytest.mark.parametrize("change", [{"windows": (7, 0)}, {"rope_layers": (True, False)}])
def test_a_layer_of_several_kinds_outside_of_a_stack_is_refused(change):
    model = family_config("mistral", **{"windows": (), **change}).model

    def attend(x_bte):
        with nnx.use_eager_sharding(False):
            layer = Attention(model, nnx.Rngs(0))
        return layer(x_bte, ForwardContext(jnp.zeros((1, 8), jnp.int32)))[0]

    with pytest.raises(ConfigError, match=r"called without one; try a Stack"):
        jax.eval_shape(attend, jax.ShapeDtypeStruct((1, 8, model.embed), jnp.float32))


def scaling(family: str, **changes) -> dict:
    return {"rope_scaling": FAMILIES[family]["rope_scaling"] | changes}


def delta(family: str, **changes) -> dict:
    return {"delta": FAMILIES[family]["delta"] | changes}


def experts(family: str, **changes) -> dict:
    return {"experts": FAMILIES[family]["experts"] | changes}


def ssd(family: str, **changes) -> dict:
    return {"ssd": FAMILIES[family]["ssd"] | changes}


# Mistakes that were made in public: what an importer, or a hand, gets wrong.
MISTAKES = [
    ("llama", {"rope_scaling": None}),
    ("llama", scaling("llama", original_length=31)),
    ("llama", {"rope_theta": 501.0}),
    ("qwen2", {"norm_epsilon": 1e-5}),
    ("qwen2", {"qkv_bias": None}),
    ("qwen3", {"query_norm": "none"}),
    ("mistral", {"windows": (8,)}),
    ("gpt2", {"mlp": "gelu_exact"}),
    ("gemma2", {"score_scale": None}),
    ("gemma2", {"score_cap": None}),
    ("gemma2", {"logit_cap": None}),
    ("gemma2", {"windows": (0, 7)}),
    ("gemma2", {"norm_offset": 0.0}),
    ("gemma2", {"embed_scale": 1.0}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"rope_theta_window": 1e6}),
    ("gemma3", {"rope_theta_window": None}),
    ("gemma4", {"norm_offset": 1.0}),
    ("gemma4", {"score_scale": None}),
    ("gemma4", {"value_norm": False}),
    ("gemma4", {"rope_share": 0.25, "rope_scaling": None}),
    ("gemma4", scaling("gemma4", share=1.0)),
    ("gemma4 alike", scaling("gemma4", factor=1.5)),
    ("phi3", scaling("phi3", use="short")),
    ("phi3", scaling("phi3", scale=1.0)),
    ("phi4", {"rope_share": 1.0}),
    ("olmo2", {"query_norm": "head"}),
    ("olmo3", scaling("olmo3", scale=None)),
    ("smollm3", {"rope_layers": ()}),
    ("smollm3", {"rope_layers": (False, True, True, True)}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logit_scale": 1.0}),
    ("gpt_oss", {"sinks": False}),
    ("gpt_oss", scaling("gpt_oss", truncate=True)),
    ("deepseek_v3", scaling("deepseek_v3", scale=None)),
    ("gated channels", {"rope_share": 1.0}),
    ("ministral3", {"temperature": None}),
    ("ministral3", {"temperature": {"weight": 0.1, "length": 12, "offset": 1}}),
    ("cooled without rope", {"temperature": {"weight": 0.3, "length": 12, "offset": 1}}),
    ("qwen2_moe", experts("qwen2_moe", normalise=True)),
    ("ernie4_5_moe", experts("ernie4_5_moe", smallest_sum=1e-20)),
    ("ernie4_5_moe", experts("ernie4_5_moe", bias_rate=None)),
    ("ernie4_5_moe", experts("ernie4_5_moe", score="sigmoid")),
    ("mixtral", experts("mixtral", normalise=False)),
    ("qwen3_moe", experts("qwen3_moe", normalise=True)),
    ("deepseek_v3", {"score_scale": None}),
    ("deepseek_v3", experts("deepseek_v3", groups_kept=4)),
    ("deepseek_v3", experts("deepseek_v3", score="softmax")),
    ("deepseek_v3", experts("deepseek_v3", normalise=False)),
    ("deepseek_v3", experts("deepseek_v3", scale=1.0)),
    ("glm4_moe", {"query_norm": "none"}),
    ("glm4_moe", {"qkv_bias": None}),
    ("glm4_moe", {"rope_share": 1.0}),
    ("glm4_moe", {"norm_epsilon": 1e-6}),
    ("glm4_moe", experts("glm4_moe", groups_kept=4)),
    ("glm4_moe", experts("glm4_moe", bias_rate=None)),
    ("glm4_moe_lite", {"latent": FAMILIES["glm4_moe_lite"]["latent"] | {"epsilon": None}}),
    ("minimax_m2", {"query_norm": "head"}),
    ("minimax_m2", {"rope_share": 1.0}),
    ("minimax_m2", experts("minimax_m2", score="softmax")),
    ("exaone4", {"rope_layers": ()}),
    ("cohere2", {"norm_places": "after"}),
    ("cohere2", {"norm": "rmsnorm"}),
    ("cohere2", {"rope_layers": ()}),
    ("afmoe", {"embed_scale": 1.0}),
    ("afmoe", {"rope_layers": ()}),
    ("afmoe", experts("afmoe", bias_rate=None)),
    ("qwen3_5", {"norm_offset": 0.0}),
    ("qwen3_5", {"norm_epsilon": 1e-4}),
    ("qwen3_5", {"rope_share": 1.0}),
    ("qwen3_5", delta("qwen3_5", gate="sigmoid")),
    ("olmo_hybrid", delta("olmo_hybrid", rate=1)),
    ("olmo_hybrid", delta("olmo_hybrid", epsilon=None)),
    ("olmo_hybrid", delta("olmo_hybrid", gate="sigmoid")),
    ("olmo_hybrid", {"rope_layers": ()}),
    ("kimi_linear", {"rope_layers": ()}),
    ("kimi_linear", {"latent": FAMILIES["kimi_linear"]["latent"] | {"epsilon": None}}),
    ("kimi_linear", delta("kimi_linear", gate="silu")),
    ("kimi_linear", delta("kimi_linear", rate=2)),
    ("kimi_linear", experts("kimi_linear", bias_rate=None)),
    ("nemotron_h", {"rope_layers": ()}),
    ("nemotron_h", {"norm_epsilon": 1e-6}),
    ("nemotron_h", experts("nemotron_h", scale=1.0)),
    ("nemotron_h, clamped", ssd("nemotron_h, clamped", largest_step=None)),
    ("nemotron_h, clamped", ssd("nemotron_h, clamped", smallest_step=0.001)),
    ("granitemoehybrid", {"rope_layers": ()}),
    ("granitemoehybrid", {"logit_scale": 8.0}),
    ("granitemoehybrid", {"score_scale": None}),
    ("falcon_h1", ssd("falcon_h1", factors=(1.0,) * 5)),
    ("falcon_h1", {"score_scale": None}),
    ("falcon_h1", ssd("falcon_h1", norm_first=True)),
    ("falcon_h1", {"mlp_out_factor": 1.0}),
    ("llama4", {"chunks": ()}),
    ("llama4", {"chunks": (11, 11, 0)}),
    ("llama4", {"chunks": (), "windows": (12, 12, 0)}),
    ("llama4", {"rope_layers": (True, False, False)}),
    ("llama4", {"query_norm": "none"}),
    ("llama4", {"rope_scaling": None}),
    ("llama4", scaling("llama4", high_factor=4.0)),
    ("llama4", {"temperature": None}),
    ("llama4", {"temperature": FAMILIES["llama4"]["temperature"] | {"offset": 0}}),
    ("llama4", {"temperature": FAMILIES["llama4"]["temperature"] | {"layers": "all"}}),
    ("llama4", experts("llama4", gate_input=False)),
    ("llama4", experts("llama4", score="softmax")),
    ("lfm2", {"query_norm": "none"}),
    ("lfm2_moe", experts("lfm2_moe", bias_rate=None)),
    ("lfm2_moe", experts("lfm2_moe", normalise=False)),
    ("lfm2_moe", experts("lfm2_moe", sum_epsilon=0.0)),
]


@pytest.mark.seconds
@pytest.mark.parametrize(("name", "change"), MISTAKES, ids=lambda each: str(each)[:60])
def test_a_mistake_in_one_setting_shows_in_the_logits(name, change):
    """Or the comparison above would hold with the mistake in it too."""
    config, _, params = made(name)
    other = family_config(name, **change).model
    if other.query_norm != config.model.query_norm:
        params = params | {path: p[:, : _width(other)] for path, p in _query_norms(params).items()}
    if other.qkv_bias != config.model.qkv_bias:
        params = {path: p for path, p in params.items() if not path.endswith("qkv_bias")}
    mistaken = logits_by_definition(other, params, TOKENS)
    assert apart(mistaken, logits_by_definition(config.model, made(name)[2], TOKENS)) > 1e-5


def by_pairs(model, x_bthd, window):
    """Neighbouring channels turned together, which are half a head apart in all files but three."""
    dim = int(x_bthd.shape[-1] * model.rope_share)
    order = np.arange(dim).reshape(2, -1).T.reshape(-1)  # where neighbours come from
    halves = np.concatenate((x_bthd[..., :dim:2], x_bthd[..., 1:dim:2], x_bthd[..., dim:]), -1)
    found = family_oracle_turned(model, halves, window)
    return np.concatenate((found[..., order], found[..., dim:]), -1)


def exact_gelu(x):
    return x * np.vectorize(lambda y: 0.5 * (1 + math.erf(y / math.sqrt(2))))(x)


def scores_with_their_bias(model, p, x):
    """Gates of DeepSeek-V3 that hold the bias, which may only choose."""
    logits, scores, gates = family_oracle_gates(model, p, x)
    gates = np.where(gates > 0, scores + p["mlp.router.load_bias_x"], 0)
    return logits, scores, model.experts.scale * gates / gates.sum(-1, keepdims=True)


def silu_gate(model, p, x):
    """The gate with another function than a sigmoid."""
    share = family_oracle_output_gate(model, p, x)
    return share * np.log(share / (1 - share))


def one_decay_of_a_head(config, weight, x, starts):
    """Kimi Delta Attention with the mean of the decays of a head's channels."""

    def averaged(name):
        found = weight(name)
        if name == "narrow_decay.up_lhn":
            found = np.broadcast_to(found.mean(-1, keepdims=True), found.shape)
        if name == "decay_bias":
            by_head = found.reshape(config.delta.value_heads, -1)
            found = np.broadcast_to(by_head.mean(1, keepdims=True), by_head.shape).reshape(-1)
        return found

    return delta_layer(config, averaged, x, starts)


def with_weight(changed, change):
    """A gated delta rule that reads one of its weights otherwise."""

    def layer(config, weight, x, starts):
        def read(name):
            return change(weight(name)) if name == changed else weight(name)

        return delta_layer(config, read, x, starts)

    return layer


def rounded(x):
    return np.float64(x.astype(jnp.bfloat16))


def gated_then_normed(config, weight, x, starts):
    """The gate in front of the norm, as in a state space."""

    def gated(o, gate, scale, epsilon):
        return mixer_oracle.normed_then_gated(o * gate, 1, scale, epsilon)

    return delta_layer(config, weight, x, starts, gated=gated)


def with_keys_in_turn(config, weight, x, starts):
    """Key heads that serve each so-many-th value head, and not the next ones."""
    delta = config.delta
    heads, values = delta.key_heads, delta.value_heads
    keys = [number % heads for number in range(values)]

    def read(name):
        w = weight(name)
        if name in ("qkvz_ehn", "taps_hnw"):
            axis = 1 if name == "qkvz_ehn" else 0
            of_keys, of_values = np.split(w, [2 * delta.key_dim], axis + 1)
            kinds = of_values.shape[axis + 1] // delta.group // delta.value_dim
            shape = of_values.shape
            apart = (*shape[: axis + 1], kinds, delta.group, delta.value_dim, *shape[axis + 2 :])
            by_head = np.moveaxis(of_values.reshape(apart), axis + 2, axis + 1)
            own = by_head.reshape(
                *shape[:axis], values, kinds * delta.value_dim, *shape[axis + 2 :]
            )
            return np.concatenate((of_keys.take(keys, axis), own), axis + 1)
        if name == "rates_ehn":
            parts = w.reshape(len(w), heads, 2, delta.group)
            return np.moveaxis(parts, 2, 3).reshape(len(w), values, 2)
        return w.reshape(values, 1, *w.shape[2:]) if name == "out_hrve" else w

    own = delta.model_copy(update={"key_heads": values})
    return delta_layer(config.model_copy(update={"delta": own}), read, x, starts)


def in_another_order(config, weight, x, starts):
    """The parts of a short convolution as C, B, x."""

    def swapped(name):
        return weight(name)[:, [1, 0, 2]] if name == "in_e3c" else weight(name)

    return conv_layer(config, swapped, x, starts)


def gated_behind_the_taps(_, weight, x, starts):
    """A short convolution whose first gate comes behind it."""
    before, after, value = (np.einsum("bte,ec->btc", x, part) for part in parts_of(weight))
    y = after * before * convolution(value, weight("taps_cw"), starts)
    return np.einsum("btc,ce->bte", y, weight("out_ce"))


def activated(_, weight, x, starts):
    """A short convolution with a silu, as in front of the delta rule."""
    before, after, value = (np.einsum("bte,ec->btc", x, part) for part in parts_of(weight))
    y = convolution(before * value, weight("taps_cw"), starts)
    return np.einsum("btc,ce->bte", after * y / (1 + np.exp(-y)), weight("out_ce"))


def parts_of(weight):
    return np.moveaxis(weight("in_e3c"), 1, 0)


def values_after_their_norm(model, p, x, number, window):
    """Values that are keys, and were normed and turned with them."""
    q, k, v = family_oracle_grouped(model, p, x, number, window)
    return q, k, v if window else k


def gate_of_a_normed_stream(model, p, x):
    return family_oracle_gated_own(model, p, x / np.sqrt((x * x).mean(-1, keepdims=True)))


def tokens_of_another_size(model, p, x, tokens_bt):
    """Rows of the table without the root of their width."""
    width = np.sqrt(model.token_layers.dim)
    smaller = p | {"blocks.beside.table_vf": p["blocks.beside.table_vf"] / width}
    return family_oracle_token_layers(model, smaller, x, tokens_bt)


family_oracle_gated_own = family_oracle.gated_own
family_oracle_token_layers = family_oracle.token_layers
family_oracle_grouped = family_oracle.grouped


def normed_over_all_groups(config, weight, x, starts):
    """A state space with one norm where each group has its own."""
    groups = config.ssd.groups
    one = config.model_copy(update={"ssd": config.ssd.model_copy(update={"norm": "none"})})

    def before_projection(name):
        inner = config.ssd.heads * config.ssd.head_dim
        heads = (groups, config.ssd.group, config.ssd.head_dim)
        return np.eye(inner).reshape(*heads, inner) if name == "out_hrve" else weight(name)

    y = ssd_layer(one, before_projection, x, starts) / config.ssd.out_factor
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + config.norm_epsilon) * weight("norm_scale")
    out = weight("out_hrve")
    return config.ssd.out_factor * y @ out.reshape(-1, out.shape[-1])


def without(left_out):
    """A state space whose weight of this name is 0."""

    def layer(config, weight, x, starts):
        return ssd_layer(config, lambda name: weight(name) * (name != left_out), x, starts)

    return layer


def with_epsilon(epsilon):
    """A state space whose norm has another epsilon."""

    def layer(config, weight, x, starts):
        own = config.ssd.model_copy(update={"epsilon": epsilon})
        return ssd_layer(config.model_copy(update={"ssd": own}), weight, x, starts)

    return layer


def factor_behind_silu(model, p, x):
    """An mlp whose factor multiplies the activated gate."""
    plain = model.model_copy(update={"mlp_gate_factor": 1.0})
    return model.mlp_gate_factor * family_oracle_mlp(plain, p, x)


def bias_without_its_gate(model, p, x, found):
    """Experts whose last bias is added once, whatever their gates are."""
    weighted = family_oracle_experts(model, p | {"mlp.down_bias": 0 * p["mlp.down_bias"]}, x, found)
    return weighted + np.einsum("btx,xe->bte", found > 0, p["mlp.down_bias"])


STATE_SPACES = ("nemotron_h", "granitemoehybrid", "falcon_h1")
family_oracle_mlp, family_oracle_experts = family_oracle.mlp, family_oracle.experts
family_oracle_output_gate = family_oracle.output_gate
family_oracle_turned, family_oracle_gates = family_oracle.turned, family_oracle.gates
# The same of formulas, for which there is no setting.
MISTAKEN_FORMULAS = [
    *((family, "turned", by_pairs) for family in ("llama", "qwen3", "phi4", "deepseek_v3")),
    *((family, "turned", by_pairs) for family in ("glm4_moe", "glm4_moe_lite")),
    ("gemma2", "gelu_tanh", exact_gelu),
    ("gemma3", "gelu_tanh", exact_gelu),
    ("gemma4", "gelu_tanh", exact_gelu),
    ("gemma4 with tokens", "gated_own", gate_of_a_normed_stream),
    ("gemma4 with tokens", "token_layers", tokens_of_another_size),
    ("gemma4 with shared keys", "keep", lambda kept, *keys: kept.setdefault(*keys)),
    ("gemma4", "grouped", values_after_their_norm),
    ("gemma4", "scaled_layer", lambda x, *_: x),
    ("gemma4 with experts", "routers_input", lambda *given: given[-1]),
    ("gemma4 with experts", "expert_scale", lambda _: 1.0),
    ("gemma4 with experts", "shared_experts", lambda *given: np.zeros_like(given[-1])),
    ("gemma4 with experts", "grouped", values_after_their_norm),
    ("gpt_oss", "CLAMP", 1000),
    ("gpt_oss", "experts", bias_without_its_gate),
    ("gated channels", "output_gate", lambda *_: 1.0),
    ("gated heads", "output_gate", lambda *_: 1.0),
    ("afmoe", "output_gate", lambda *_: 1.0),
    ("qwen2_moe", "shared_gate", lambda *_: 1.0),
    ("arcee", "relu2", lambda x: x / (1 + np.exp(-x))),
    ("apertus", "xielu", lambda x, *_: x / (1 + np.exp(-x))),
    ("ernie4_5_moe", "gates", scores_with_their_bias),
    ("gated channels", "output_gate", silu_gate),
    ("deepseek_v3", "gates", scores_with_their_bias),
    ("minimax_m2", "gates", scores_with_their_bias),
    ("lfm2_moe", "gates", scores_with_their_bias),
    ("kimi_linear", "delta_layer", one_decay_of_a_head),
    ("kimi_linear", "delta_layer", with_weight("decay_log", rounded)),
    ("qwen3_5", "delta_layer", with_weight("decay_log", rounded)),
    ("qwen3_5", "delta_layer", with_weight("decay_bias", rounded)),
    ("qwen3_5", "delta_layer", with_weight("norm_scale_v", lambda w: w + 1)),
    ("qwen3_5", "delta_layer", with_weight("taps_hnw", lambda w: w[..., ::-1])),
    ("qwen3_5", "delta_layer", gated_then_normed),
    ("qwen3_5", "delta_layer", with_keys_in_turn),
    ("qwen3_5", "output_gate", lambda *_: 1.0),
    ("nemotron_h", "gates", scores_with_their_bias),
    ("llama4", "turned", by_pairs),
    ("llama4", "shared_gate", lambda *_: 0.0),
    ("lfm2", "conv_layer", in_another_order),
    ("lfm2_moe", "conv_layer", gated_behind_the_taps),
    ("lfm2_moe", "conv_layer", activated),
    ("nemotron_h", "ssd_layer", normed_over_all_groups),
    ("granitemoehybrid", "ssd_layer", normed_over_all_groups),
    *((family, "ssd_layer", without("skip")) for family in STATE_SPACES),
    *((family, "ssd_layer", without("taps_bias_hrv")) for family in STATE_SPACES),
    *((family, "ssd_layer", without("taps_bias_hn")) for family in STATE_SPACES),
    ("nemotron_h", "ssd_layer", with_epsilon(1e-6)),
    ("nemotron_h", "relu2", lambda x: x / (1 + np.exp(-x))),
    ("falcon_h1", "gate_factor", lambda _, gate: gate),
    ("falcon_h1", "mlp", factor_behind_silu),
]


@pytest.mark.parametrize(("name", "formula", "mistake"), MISTAKEN_FORMULAS)
def test_a_mistake_in_a_formula_shows_in_the_logits(name, formula, mistake, monkeypatch):
    config, _, params = made(name)
    right = logits_by_definition(config.model, params, TOKENS)
    monkeypatch.setattr(family_oracle, formula, mistake)
    assert apart(logits_by_definition(config.model, params, TOKENS), right) > 1e-5


def test_far_positions_turn_as_exactly_as_near_ones():
    """Frequencies of 16 bits would be off by radians at the position 4095."""
    positions = np.array([[4095]])
    x = np.random.default_rng(3).standard_normal((1, 1, 1, 1, 64)).astype(jnp.bfloat16)
    got = rotate(jnp.asarray(x), jnp.asarray(positions), 5e5).astype(jnp.float32)
    exact = x.astype(np.float64)
    angle = 4095 * 5e5 ** (-np.arange(32) / 32)
    turned = (exact[..., :32] + 1j * exact[..., 32:]) * np.exp(1j * angle)
    want = np.concatenate((turned.real, turned.imag), -1)
    assert np.abs(np.asarray(got) - want).max() < 2**-7 * np.abs(want).max()


def _query_norms(params):
    return {path: p for path, p in params.items() if "query_key_norm" in path}


def _width(model) -> int:
    return model.head_dim
