"""Healthy layouts agree with one device; a collective that is broken from outside is found."""

import json
from dataclasses import fields
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from fuzz.campaign import ROOT

from spmdtrain.compiled.step_memory import StepMemory
from spmdtrain.config import load
from spmdtrain.lab.certify import against
from spmdtrain.lab.certify.certificate_page import page
from spmdtrain.lab.certify.certify import Certificate, Examined, certify, examine, values
from spmdtrain.lab.certify.cover import COLLECTIVE, Layout
from spmdtrain.lab.certify.noise import Reference, make_reference
from spmdtrain.lab.certify.shrink import Shrunk, shrink
from spmdtrain.lab.certify.stepper import Own, Stepper
from spmdtrain.lab.certify.witnesses.mixing import APART, samples_apart
from spmdtrain.lab.certify.witnesses.real_size import judge
from spmdtrain.lab.certify.witnesses.witness import (
    Witness,
    slope_witness,
    update_witness,
    witnesses,
)
from spmdtrain.models.layers.mlp import Mlp
from spmdtrain.models.transformer import Transformer

BASE = ROOT / "tests" / "certified" / "base.toml"
TINY = ("model.embed=16", "model.heads=2", "model.kv_heads=2", "train.sequence_length=8")
LAYOUTS = {
    "psum": ("mesh.data=2", "train.zero=1"),
    "psum_scatter": ("mesh.fsdp=2", "train.microbatch=6"),
    "all_gather": ("mesh.fsdp=2", "train.microbatch=6"),
    "ppermute": ("mesh.pipeline=2", "train.microbatch=12"),
    "all_to_all": ("mesh.context=2", "model.context_attention=ulysses"),
}


@cache
def small() -> Shrunk:
    return shrink(load(BASE, TINY), as_is=True)


@cache
def reference() -> Reference:
    return make_reference(small().config, 2, Own())


@cache
def examined(name: str) -> Examined:
    return examine(reference(), Layout(LAYOUTS[name], "given"), Own())


@pytest.mark.long
@pytest.mark.parametrize("name", ["psum", "ppermute"])
def test_a_healthy_layout_agrees(name):
    found = examined(name)
    assert (found.verdict, found.details) == ("agrees", "")
    assert len(found.ratios) > 100 and found.ratios[0] < 4


def sabotaged(name: str):
    real = getattr(jax.lax, name)

    def broken(x, *arguments, **keywords):
        """A thousandth is left out: no shape, no sign and no size gives it away."""
        out = real(x, *arguments, **keywords)
        return jax.tree.map(
            lambda y: y * 0.999 if isinstance(y, jax.Array) and y.dtype.kind == "f" else y, out
        )

    return broken


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_collective_that_is_sabotaged_from_outside_is_found(name, monkeypatch):
    reference()
    monkeypatch.setattr(jax.lax, name, sabotaged(name))
    found = examine(reference(), Layout(LAYOUTS[name], "given"), Own())
    assert found.verdict == "differs"
    assert found.first is not None and found.first.step == 0 and found.ratios[0] > 100


@pytest.mark.long
def test_witnesses_hold_and_one_that_is_broken_does_not(monkeypatch):
    healthy = witnesses(reference(), Own())
    assert [each for each in healthy if each.holds is not True] == []
    assert len(healthy) == 11
    figures = reference().figures[1]
    leaf = next(leaf for leaf in figures.arrays if leaf.kind == "gradient")
    monkeypatch.setitem(figures.arrays, leaf, figures.arrays[leaf] * 1.5)
    failing = {each.name for each in witnesses(reference(), Own()) if not each.holds}
    assert "the gradient is the slope of the loss" in failing
    assert "weights move as the optimizer says, from these gradients" in failing


DELTA = ("key_heads=1", "value_heads=2", "key_dim=4", "value_dim=6", "taps=2")
SSD = ("heads=2", "head_dim=4", "state=3")
# Each has parameters of its own: losses of further tokens, loads of experts, decays of mixers.
PARTS = {
    "further tokens": ("model.multi_token.depth=1",),
    "experts and mixers": (
        *("model.layers=4", "model.mixers=['delta', 'ssd', 'conv', 'attention']"),
        *(f"model.delta.{size}" for size in DELTA),
        *(f"model.ssd.{size}" for size in SSD),
        *("model.conv.taps=2", "model.experts.count=4", "model.experts.chosen=4"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PARTS)
def test_the_slope_is_that_of_all_losses_and_weights_move_by_it(name):
    """Whatever a step minimises, together, and whatever parameters a model has."""
    config = shrink(load(BASE, (*TINY, *PARTS[name])), as_is=True).config
    stepper = Stepper(config, jax.devices()[:1], Own())
    states, figures = [stepper.begin()], []
    with stepper.batches() as ahead:
        batches = [next(ahead), next(ahead)]
    for batch in batches:
        after, of_step = stepper.take(states[-1], batch)
        states, figures = [*states, after], [*figures, of_step]
    alone = Reference(stepper, 1, batches, states, figures, [], [], [])
    for witness in (slope_witness(alone), update_witness(alone, Own())):
        assert witness.holds, witness.details


class Centred(Mlp):
    """An mlp that takes the mean of the batch off, so that samples have to do with each other."""

    def __call__(self, x_bte, ctx):
        return super().__call__(x_bte - x_bte.mean(0), ctx)


@pytest.mark.long
def test_a_model_that_mixes_samples_is_named_and_does_not_widen_the_floors():
    alone, over_data = (Layout((f"mesh.{axis}=2",), "given") for axis in ("tensor", "data"))
    healthy = samples_apart(reference(), [over_data])
    assert (healthy.holds, healthy.details) == (True, "")
    own = Own(make=partial(Transformer, mlp=Centred))
    mixing = make_reference(small().config, 1, own)
    said = samples_apart(mixing, [alone, over_data])
    assert said.holds is False and "mixes the samples of a batch: in 4 microbatches" in said.details
    assert samples_apart(mixing, [alone]).holds is None
    found = examine(mixing, over_data, own)
    assert (found.verdict, found.details) == ("differs", "") and found.ratios[0] > 1000


def certificate(*layouts: Examined) -> Certificate:
    return Certificate(small(), 2, reference(), list(layouts), [])


def differing() -> Examined:
    found = examined("psum")
    worse = [1e6, *found.ratios[1:]]
    return Examined(found.layout, "differs", worse, found.first, found.worst, 1)


@pytest.mark.seconds
def test_a_page_stands_alone_and_says_what_it_does_not_prove():
    good, bad = certificate(examined("psum")), certificate(differing())
    assert good.is_certified and not bad.is_certified
    text = page(bad, "<run>", [("jax", "0")])
    assert "refused" in text and "&lt;run&gt;" in text and "<run>" not in text
    assert "What this does not prove" in text and 'class="dot wrong"' in text
    assert not any(word in text for word in ("http:", "https:", "src=", "url(", "<script"))
    assert len(text) < 100_000
    assert 'class="dot wrong"' not in page(good, "run", [])
    good.witnesses = [Witness(APART, None, "the model mixes samples")]
    assert good.is_certified and "<li>the model mixes samples</li>" in page(good, "run", [])


def test_an_older_certificate_must_say_the_same(tmp_path):
    found = values(certificate(examined("psum")))
    file = tmp_path / "old.json"
    file.write_text(json.dumps(found), encoding="utf-8")
    older = against.read(file)
    assert against.changes(older, found) == []
    now = json.loads(json.dumps(found))
    now["layouts"][0]["verdict"] = "differs"
    assert against.changes(older, now) == ["data 2, zero 1: agrees before, differs now"]
    now = json.loads(json.dumps(found))
    name = next(name for name in now["reference"][0]["norms"] if name.startswith("optimizer"))
    now["reference"][0]["norms"][name] *= 1.001
    (line,) = against.changes(older, now)
    assert "from step 1 on" in line and name in line


@pytest.mark.parametrize("name", against.RENAMED)
def test_an_older_certificate_has_the_old_names_of_witnesses(name):
    def of(name: str, holds: bool) -> dict:
        nothing = {"layouts": [], "resume": [], "others": [], "reference": []}
        return nothing | {"witnesses": [{"name": name, "holds": holds}]}

    older, today = of(name, True), against.RENAMED[name]
    assert against.changes(older, of(today, True)) == []
    assert against.changes(older, of(today, False)) == [f"{today}: True before, False now"]


def test_the_real_size_is_held_against_memory_and_theory():
    held = dict.fromkeys((each.name for each in fields(StepMemory)), 0) | {"argument_bytes": 60}
    compiled = {"memory": held, "traffic": [{"axis": "data", "bytes": 100.0}]}
    fits, sends = judge({"compiled": compiled, "needed_traffic": {"data": 90.0}}, 80e0)
    assert (fits.holds, sends.holds) == (True, True)
    fits, sends = judge({"compiled": compiled, "needed_traffic": {"data": 50.0}}, 60e0)
    assert (fits.holds, sends.holds) == (False, False)


@pytest.mark.slow
def test_a_certificate_from_its_first_line_to_its_last():
    layouts = [Layout((*LAYOUTS["ppermute"], "mesh.tensor=2", *COLLECTIVE), "given")]
    said: list[str] = []
    found = certify(small(), layouts, steps=2, say=said.append)
    assert found.is_certified and len(found.resume) == 2
    assert np.isfinite(found.seconds) and any(line.startswith("resume") for line in said)
    assert Path(BASE).exists()
