"""Steps in 16 and 8 bits are those of float32, for every kind of layer, weight, rule and mesh."""

import jax
import pytest
from fuzz.campaign import ROOT
from helpers import MESHES, prepared, tiny
from models.families import rich
from shares import rest

from spmdtrain.config import load
from spmdtrain.lab.certify.certify import Certificate
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.in_own_precision import add_narrow_gradients
from spmdtrain.lab.certify.noise import Reference
from spmdtrain.lab.certify.shrink import shrink
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.witnesses.own_precision import narrow_gradients
from spmdtrain.lab.certify.witnesses.witness import Witness
from spmdtrain.parallel import wide_sums
from spmdtrain.parallel.wide_sums import narrow_sums
from spmdtrain.train.items import ema
from spmdtrain.train.step import make_gradients

BFLOAT16 = "precision.compute=bfloat16"
FLOAT8 = (BFLOAT16, "precision.matmul=float8")
ONE_DEVICE = ()
PIPELINE = ("mesh.pipeline=2", "mesh.context=2", "mesh.data=2", "train.microbatch=6")
RING = ("mesh.context=2", "mesh.data=2", "train.microbatch=6")
SHARDED = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=6", "train.zero=1")
EXPERTS = ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2", "train.microbatch=12")


def rule(name: str) -> str:
    return f"optimizer.name={name}"


LORA = ("finetune.kind=dora", "finetune.rank=4", "finetune.also_train=*norm*,tokens.*")

AVERAGE = "optimizer.ema=0.999"
EIGHT = "optimizer.moment_dtype=8bit"
# Decays of channels, of heads without a correction, and a convolution alone.
LINEAR = (
    "model.mixers=delta,ssd,conv,attention",
    *(f"model.delta.{size}" for size in ("key_heads=16", "value_heads=32", "decay=channel")),
    *("model.delta.key_dim=128", "model.delta.value_dim=128", "model.conv.taps=3"),
    *("model.ssd.heads=64", "model.ssd.head_dim=64", "model.ssd.groups=8"),
)
NARROW = ("precision.params=bfloat16", "precision.rounding=stochastic", AVERAGE)

# (config, settings, layout): each kind of layer, of weight, of optimizer and of mesh at least once.
CASES = [
    ("quickstart", (BFLOAT16, AVERAGE, EIGHT), ONE_DEVICE),  # tied, biases, learned positions
    ("llama3_8b", (BFLOAT16, rule("muon")), SHARDED),  # not tied, gated, grouped heads
    ("gpt_oss_20b", (BFLOAT16, rule("adafactor")), ONE_DEVICE),  # sinks, windows, expert biases
    ("deepseek_v3", (BFLOAT16, rule("lion")), ONE_DEVICE),  # latents, shared experts, two tokens
    ("qwen3_30b_a3b", (BFLOAT16, rule("lamb")), EXPERTS),  # norms of queries and keys
    ("llama3_8b", (BFLOAT16, *LINEAR, rule("sgd")), RING),  # states and convolutions over devices
    ("quickstart", (BFLOAT16, rule("sgd")), PIPELINE),
    ("quickstart", (BFLOAT16, *LORA, rule("schedule_free_adamw")), ONE_DEVICE),
    ("quickstart", (BFLOAT16, *NARROW, "train.z_loss=1e-3"), SHARDED),
    ("llama3_8b", ("precision.compute=float16", rule("soap")), ONE_DEVICE),
    ("llama3_8b", FLOAT8, ONE_DEVICE),
    ("llama3_8b", (*FLOAT8, "precision.scaling=delayed"), ONE_DEVICE),
]


def witness(config: str, settings, layout, **more) -> Witness:
    asked = load(ROOT / "configs" / f"{config}.toml", settings)
    wide, narrow = (shrink(asked, precision=which).config for which in ("float32", "asked"))
    return narrow_gradients(wide, narrow, Layout(layout, "as configured"), Own(), **more)


@pytest.mark.long
@pytest.mark.parametrize(("config", "settings", "layout"), CASES)
def test_a_narrow_gradient_is_that_of_float32(config, settings, layout):
    found = witness(config, settings, layout)
    assert found.holds, found.details


# Gemma 4 with experts, shared keys and embeddings of layers, or with keys that are values; Llama 4.
WHOLE = ("own", "beside, sharing", "chunked")


@rest("fifty seconds; the tests of programs below see such sums without running them")
@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_a_narrow_gradient_of_a_whole_family_is_that_of_float32(name):
    """A certificate drops parts of these models when it shrinks them, so they are compared here."""
    wide, narrow = (tiny(*rich(name), f"precision.compute={x}") for x in ("float32", "bfloat16"))
    found = narrow_gradients(wide, narrow, Layout((), "one device"), Own(), tokens=4096)
    assert found.holds, found.details


@rest("half a minute; the tests of programs below see such sums without running them")
@pytest.mark.long
def test_so_it_is_of_64k_tokens_of_a_tiny_vocabulary():
    settings = (BFLOAT16, "model.layers=1", "model.vocab=8")
    found = witness("llama3_8b", settings, ONE_DEVICE, tokens=2**16)
    assert found.holds, found.details


@pytest.fixture
def narrow_everywhere(monkeypatch):
    """The step as it was: sums over tokens in the dtype of their terms."""
    monkeypatch.setattr(wide_sums, "with_wide_sums", lambda function, *_: function)


@pytest.mark.long
def test_an_average_in_16_bits_is_found(monkeypatch):
    """It moves by a thousandth of the way to its weights, less than bfloat16 resolves."""

    def narrow(x):
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    def update(average, decay, params):
        return {
            path: narrow(narrow(x) + (1 - decay) * (params[path] - narrow(x)))
            for path, x in average.items()
        }

    monkeypatch.setattr(ema, "update", update)
    found = witness("quickstart", (BFLOAT16, AVERAGE), ONE_DEVICE, tokens=256)
    assert not found.holds
    assert "leaves: ema " in found.details


@pytest.mark.core
@pytest.mark.long
@pytest.mark.usefixtures("narrow_everywhere")
def test_sums_in_16_bits_are_found_and_their_leaves_named():
    found = witness("quickstart", (BFLOAT16,), ONE_DEVICE)
    assert not found.holds
    assert "tokens.table_ve is" in found.details


@pytest.mark.long
@pytest.mark.usefixtures("narrow_everywhere")
def test_no_certificate_is_given_then():
    asked = load(ROOT / "configs" / "quickstart.toml", (BFLOAT16,))
    reference = object.__new__(Reference)
    object.__setattr__(reference, "mixed", [])
    certificate = Certificate(shrink(asked), 2, reference, [], [])
    lines: list[str] = []
    add_narrow_gradients(certificate, shrink(asked, precision="asked"), Own(), lines.append)
    assert certificate.wrong == ["a step in bfloat16 is that of float32 (one device)"]
    assert any("FAILS" in line for line in lines)


# --- the program of the step ----------------------------------------------------------------------

TOKENS = ("data.corpus=tokens", "data.path=pairs.bin", "data.packing=best_fit")
SMALL = ("model.layers=2", "model.embed=32", "model.heads=4", "model.vocab=64")
LLAMA = ("model.name=llama", *SMALL)
LATENTS = ("model.latent.rank=8", "model.latent.plain_dim=8", "model.latent.rope_dim=4")
EXPERTS_OF_FOUR = tuple(f"model.experts.{x}" for x in ("count=4", "chosen=2", "ffn=16", "shared=1"))
KINDS = {
    "gpt": (),
    "llama, packed": (*LLAMA, "data.packing=documents"),
    "experts": (*LLAMA, *EXPERTS_OF_FOUR, "train.z_loss=1e-3"),
    "latents": (*LLAMA, *LATENTS, "model.latent.value_dim=8"),
    "further tokens": (*LLAMA, "model.multi_token.depth=1"),
    "Gemma 4": rich("beside, sharing"),
    "adapters": LORA,
    "pairs": (*TOKENS, "model.positions=rope", "train.preference=simpo", "train.global_batch=8"),
    "recomputed": ("train.remat=full",),
    "written out": ("train.scan_layers=false",),
    "float8": FLOAT8,
}
REFUSED_BESIDE_STAGES = ("written out", "Gemma 4")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_program_of_a_step_has_no_long_sum_in_16_bits(kind, mesh):
    if "pipeline" in mesh and kind in REFUSED_BESIDE_STAGES:
        mesh = "one device"
    setup = prepared(BFLOAT16, *KINDS[kind], *MESHES[mesh])
    program = jax.make_jaxpr(make_gradients(setup))(setup.state.params, 0, setup.batch)
    assert [str(equation.source_info.name_stack) for equation in narrow_sums(program)] == []
