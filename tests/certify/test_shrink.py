"""A run made small keeps what decides which code runs, and its layouts cover the axes."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from fuzz.campaign import ROOT
from fuzz.draw import config_of, numbers_of
from jax.sharding import AbstractMesh

from spmdtrain.config import ConfigError, RunConfig, load
from spmdtrain.config.schema import MeshConfig, MultiTokenConfig, PrecisionConfig
from spmdtrain.lab.certify.cover import AXES, DEVICES, UNEVEN, Layout, cover, fitted, parse_layouts
from spmdtrain.lab.certify.drawn import draw_layouts
from spmdtrain.lab.certify.shrink import BATCH, LENGTH, shrink
from spmdtrain.lab.certify.witnesses.resume import with_settings
from spmdtrain.pipeline.find_table import choose_table
from spmdtrain.train.shard import shard_on
from tests.models.families import FAMILIES, family_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
KEPT = {
    "model": (
        "name",
        "positions",
        "norm",
        "mlp",
        "tied",
        "query_norm",
        "output_gate",
        "sinks",
        "norm_places",
        "dropout",
        "logit_cap",
        "qkv_bias",
        "out_bias",
        "mlp_bias",
        "rope_share",
        "rope_theta",
    ),
    "train": ("label_smoothing", "z_loss", "clip", "seed"),
    "data": ("packing", "shuffle"),
    "finetune": ("kind", "targets", "base", "dropout"),
}


def assert_kept(small: RunConfig, real: RunConfig) -> None:
    for section, names in KEPT.items():
        for name in names:
            ours, theirs = (getattr(getattr(each, section), name) for each in (small, real))
            assert ours == theirs, f"{section}.{name}: {ours!r} is not {theirs!r}"
    assert small.rules == real.rules
    kept = {"warmup"}
    assert small.optimizer.model_dump(exclude=kept) == real.optimizer.model_dump(exclude=kept)
    assert bool(small.optimizer.warmup) == bool(real.optimizer.warmup)
    if real.model.experts is not None:
        for name in ("score", "normalise", "shared", "bias_rate", "balance", "z_loss", "jitter"):
            assert getattr(small.model.experts, name) == getattr(real.model.experts, name), name
        assert len(set(small.model.layer_kinds)) == len(set(real.model.layer_kinds))
    assert (small.model.experts is None) == (real.model.experts is None)
    grouped = real.model.heads > real.model.kv_heads
    assert (small.model.heads > small.model.kv_heads) == grouped
    if real.model.shared_keys:
        assert kinds_by_sharing(small.model) == kinds_by_sharing(real.model)
    else:
        windows = [bool(window) for window in real.model.windows[: real.model.layers]]
        two_rounds = [*dict.fromkeys(windows)] * 2  # of each kind of layer one
        kept = [windows, two_rounds] if real.model.full is not None else [windows]
        assert [bool(window) for window in small.model.windows] in kept
        assert small.model.rope_layers == real.model.rope_layers[: real.model.layers]
    assert (small.train.sequence_length, small.train.global_batch) == (LENGTH, BATCH)
    assert set(small.mesh.sizes.values()) == {1}
    assert small.precision.compute == "float32"


def kinds_by_sharing(model) -> list[set[tuple[bool, bool]]]:
    """Returns (has a window, has rope) of the layers with keys of their own, and of the others."""
    kinds = [(kind.window > 0, kind.rope_theta is not None) for kind in model.layer_kinds]
    first = model.layers - model.shared_keys
    return [set(kinds[:first]), set(kinds[first:])]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_published_run_keeps_its_features_and_its_layouts_fit(path):
    real = load(path)
    shrunk = shrink(real)
    assert_kept(shrunk.config, real)
    asked = shrink(real, precision="asked").config.precision
    assert asked == real.precision
    assert asked.is_given("frozen") == real.precision.is_given("frozen")
    for layout in cover(real):
        with_settings(shrunk.config, layout.overrides)


@pytest.mark.seconds
def test_a_hundred_drawn_runs_keep_their_features():
    drawn = [config for group in range(120) if (config := config_of(numbers_of(group)))]
    assert len(drawn) >= 100
    for real in drawn:
        assert_kept(shrink(real).config, real)


# Sections and settings of [model] that only some families have.
MECHANISMS = ("delta", "ssd", "conv", "both", "latent", "experts", "full", "token_layers")
MECHANISMS += ("shared_keys", "chunks", "temperature", "value_norm", "layer_scale", "indexer")
STAGES = Layout(("mesh.pipeline=2", "train.microbatch=2"), "given")
ROUNDS = {
    name: family_config(name, layers=12)
    for name in ("qwen3_5", "olmo_hybrid", "gemma4", "llama4", "nemotron_h, clamped", "falcon_h1")
}
ROUNDS["first dense"] = family_config(
    "lfm2_moe", layers=13, mixers=["conv", *["conv", "conv", "attention"] * 4]
)
ROUNDS["long windows"] = family_config("gemma4", layers=12, windows=[7, 7, 7, 7, 7, 0])


@pytest.mark.parametrize("name", [*FAMILIES, *(name for name in ROUNDS if name not in FAMILIES)])
def test_a_family_keeps_its_kinds_of_layers_and_its_layouts_load(name):
    real = family_config(name) if name in FAMILIES else ROUNDS[name]
    shrunk = shrink(real)
    small, lost = shrunk.config.model, " ".join(shrunk.lost)
    for parts in ("layer_mixers", "layer_mlps"):
        assert set(getattr(small, parts)) == set(getattr(real.model, parts)), parts
    for mechanism in MECHANISMS:
        stays = bool(getattr(small, mechanism)) == bool(getattr(real.model, mechanism))
        assert stays or (mechanism == "full" and "[model.full]" in lost), mechanism
    as_it_is = shrink(real, as_is=True).config
    assert as_it_is.model.as_given() == real.model.as_given()
    for layout in cover(real):
        if not (real.model.token_layers and layout.has_stages):
            with_settings(shrunk.config, layout.overrides)


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_that_stages_share_out_stay_rounds(name):
    real, small = ROUNDS[name], shrink(ROUNDS[name]).config
    for config in (real, small):
        staged = with_settings(config, STAGES.overrides)
        shard_on(staged, AbstractMesh(tuple(staged.mesh.sizes.values()), AXES))
    assert set(small.model.layer_parts) == set(real.model.layer_parts)


@pytest.mark.parametrize("windows", [[7, 7, 0], [7, 7, 7, 7, 0], [7], []])
@pytest.mark.parametrize("shared_keys", [1, 7])
def test_layers_that_share_keys_still_do(windows, shared_keys):
    """Keys of the last of several layers of their kind, which another layer would not have."""
    full = {"head_dim": 24, "kv_heads": 1} if 0 in windows else None
    theta = 90.0 if windows else None
    changes = {"layers": 15, "shared_keys": shared_keys, "windows": windows, "full": full}
    name = "gemma4 with shared keys"
    real = family_config(name, **changes, rope_theta_window=theta)
    shrunk = shrink(real)
    small = shrunk.config.model
    first = small.layers - small.shared_keys
    kinds = [(kind.window > 0, kind.rope_theta) for kind in small.layer_kinds]
    asked = [(kind.window > 0, kind.rope_theta) for kind in real.model.layer_kinds]
    assert set(kinds[:first]) == set(asked[: 15 - shared_keys])
    assert set(kinds[first:]) == set(asked[15 - shared_keys :])
    assert all(kinds[:first].count(kind) > 1 for kind in kinds[first:])
    assert set(small.layer_parts) == set(real.model.layer_parts)
    assert small.shared_ffn and small.shared_ffn != small.ffn
    assert not any("shared_keys" in text for text in shrunk.lost)


def test_what_no_shrinking_keeps_is_said():
    path = Path(__file__).parents[2] / "configs" / "llama3_8b.toml"
    real = load(path, ["model.windows=9000", "model.attention=cudnn", "guard.policy=rollback"])
    lost = " ".join(shrink(real).lost)
    assert "a window of 9000" in lost and "cudnn" in lost and "goes back" in lost


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        (("compression.codec=int8",), "gradients that cross `data` in int8: in float32"),
        (("sparsity.pattern=2:4",), "weights that 2:4 sets to zero"),
        (("distill.teacher=run",), "the loss against a teacher"),
        (
            ("islands.count=2", "islands.index=0", "islands.directory=d"),
            "meetings with other islands",
        ),
    ],
)
def test_a_feature_that_no_certificate_examines_is_named_and_left_out(settings, lost):
    shrunk = shrink(load(Path(__file__).parents[2] / "configs" / "llama3_8b.toml", settings))
    (text,) = (text for text in shrunk.lost if text.startswith(lost))
    section = settings[0].partition(".")[0]
    assert not getattr(shrunk.config, section).lost_in_small_runs() and text
    assert getattr(shrunk.config, section) == getattr(RunConfig(), section)


@pytest.mark.parametrize("experts", ["every=2", "first_dense=3", "groups=2"])
def test_experts_stay_in_as_many_kinds_of_layers(experts):
    path = Path(__file__).parents[2] / "configs" / "mixtral_8x7b.toml"
    real = load(path, [f"model.experts.{experts}"])
    assert_kept(shrink(real).config, real)


def test_a_long_pattern_keeps_each_kind_of_layer_once():
    patterns = (
        f"model.mixers={['ssd', 'none'] * 8 + ['attention', 'none']}",
        f"model.mlps={['none', 'experts'] * 8 + ['none', 'mlp']}",
        *("model.layers=18", "model.ssd.heads=32", "model.ssd.head_dim=64", "model.ssd.groups=4"),
    )
    path = Path(__file__).parents[2] / "configs" / "mixtral_8x7b.toml"
    small = shrink(load(path, patterns)).config.model
    assert [(layer.mixer, layer.mlp) for layer in small.layer_parts] == [
        ("ssd", "none"),
        ("none", "experts"),
        ("attention", "none"),
        ("none", "mlp"),
    ]


def test_pairs_of_answers_are_refused():
    settings = ["train.preference=simpo", "data.corpus=tokens", "data.path=x.bin"]
    real = load(CONFIGS[0], [*settings, "data.packing=best_fit", "model.multi_token=none"])
    with pytest.raises(ConfigError, match="pairs of answers"):
        shrink(real)


def pairs_of(layouts: list[Layout]) -> set[tuple[str, str]]:
    found = set()
    for layout in layouts:
        axes = [axis for axis in AXES if any(f"mesh.{axis}=" in text for text in layout.settings)]
        found |= set(itertools.combinations(axes, 2))
    return found


def test_delayed_scaling_is_certified_on_meshes_that_it_takes():
    precision = PrecisionConfig(matmul="float8", scaling="delayed")
    found = cover(RunConfig(precision=precision))
    assert len(found) > 4
    assert not any(each.has_stages or each.has_pieces for each in found)
    assert any(each.has_stages for each in cover(RunConfig()))
    assert any(each.has_pieces for each in cover(RunConfig()))


def test_a_model_that_predicts_further_tokens_is_certified_on_the_same_meshes():
    config = RunConfig()
    further = config.model.model_copy(update={"multi_token": MultiTokenConfig()})
    assert cover(config.model_copy(update={"model": further})) == cover(config)


def test_every_pair_of_axes_meets_and_no_layout_stands_twice():
    layouts = cover(RunConfig())
    missing = set(itertools.combinations(AXES, 2)) - pairs_of(layouts)
    assert not missing
    assert len({layout.settings for layout in layouts}) == len(layouts)
    assert all(1 < layout.devices <= DEVICES for layout in layouts)


@pytest.mark.parametrize("axes", list(itertools.combinations(AXES, 4)), ids=" ".join)
def test_each_long_axis_stands_with_a_ring_longer_than_two(axes):
    sizes = dict.fromkeys(axes, 8)
    asked = cover(RunConfig(mesh=MeshConfig(**sizes)), only_asked=True)
    assert pairs_of(asked) >= set(itertools.combinations(axes, 2))
    for axis in axes:
        assert any(f"mesh.{axis}=4" in layout.settings for layout in asked), axis


def test_a_model_as_it_is_fits_a_ring_of_more_devices_than_heads():
    real = load(ROOT / "tests" / "certified" / "base.toml")
    small = shrink(real, as_is=True).config
    layouts = cover(real)
    pairs = zip(layouts, fitted(layouts, small), strict=True)
    ((before, after),) = [pair for pair in pairs if pair[0] != pair[1]]
    assert "mesh.tensor=4" in before.settings and small.model.kv_heads == 2

    def laid_out(layout: Layout) -> None:
        config = with_settings(small, layout.overrides)
        shard_on(config, AbstractMesh(tuple(config.mesh.sizes.values()), AXES))

    with pytest.raises(ConfigError, match="kv_heads=2"):
        laid_out(before)
    laid_out(after)
    assert fitted([after], small) == [after]


def _uneven_file(layout: Layout) -> str:
    (file,) = (each for each in layout.overrides if each not in layout.settings)
    return file.partition("=")[2]


def test_a_layout_names_no_place_of_the_machine_that_chose_it(tmp_path, monkeypatch):
    assert not any("/" in text for layout in cover(RunConfig()) for text in layout.settings)
    (layout,) = parse_layouts([UNEVEN])
    assert Path(_uneven_file(layout)).is_absolute()
    monkeypatch.chdir(tmp_path)
    Path("uneven.csv").write_text("one of the person's own")
    assert layout.overrides == layout.settings


def test_in_the_uneven_schedule_all_work_waits_and_every_kind_of_it_stands_still():
    (layout,) = [each for each in cover(RunConfig()) if UNEVEN in each.settings]
    assert layout.name == "pipeline 3 x fsdp 2, microbatch 4, chunks 2, uneven"
    microbatches = BATCH // 2 // 4
    table = choose_table(_uneven_file(layout), 3, 2, microbatches)
    assert table.activations_wait and table.cotangent_slots and table.deferred_slots
    for kind in ("forward", "backward", "weight"):
        works = getattr(table, f"{kind}_microbatch") >= 0
        for stage in range(table.stages):
            first, *_, last = np.flatnonzero(works[:, stage])
            assert not works[first:last, stage].all(), (kind, stage)


def test_in_the_uneven_schedule_a_stage_idles_beside_a_cotangent_that_nobody_needs():
    """A backward without work makes more than zeros of it only in a tick that runs the head."""
    (layout,) = parse_layouts([UNEVEN])
    table = choose_table(_uneven_file(layout), 3, 2, BATCH // 2 // 4)
    leaves = table.leaving_microbatch[:-1] >= 0  # so its cotangent goes on, to the last stage
    head = table.head_microbatch[1:] >= 0
    idle = (table.backward_microbatch[1:, -1] < 0) & (table.weight_microbatch[1:, -1] < 0)
    assert (leaves & head & idle).any()


@pytest.mark.seconds
def test_drawn_layouts_are_the_same_for_a_seed_and_mostly_load():
    small = shrink(load(CONFIGS[0])).config
    drawn = draw_layouts(small, 200)
    assert drawn[:50] == draw_layouts(small, 50)
    assert drawn[:50] != draw_layouts(small, 50, seed=1)
    assert len({layout.settings for layout in drawn}) == 200
    for layout in drawn:
        with_settings(small, layout.overrides)


def test_a_file_of_layouts_is_one_a_line():
    found = parse_layouts(
        ["mesh.data=2 mesh.tensor=4  # two axes", "", "# none", "train.remat=full"]
    )
    assert [layout.settings for layout in found] == [
        ("mesh.data=2", "mesh.tensor=4"),
        ("train.remat=full",),
    ]
    assert found[0].name == "data 2 x tensor 4" and found[0].devices == 8
