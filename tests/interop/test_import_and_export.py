"""A published model comes in and goes out again, the same to the bit, whatever mesh holds it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import directories
import jax
import numpy as np
import pytest
from helpers import CHEAP_FLAGS, tiny

import spmdtrain as st
from spmdtrain.checkpoints import layers, store
from spmdtrain.checkpoints.files import by_layer
from spmdtrain.checkpoints.restore import weights
from spmdtrain.cli import main
from spmdtrain.cli.published import check
from spmdtrain.config import load
from spmdtrain.config.errors import CheckpointError, ConfigError, StorageError
from spmdtrain.config.published.families.all_families import FAMILIES as KNOWN_FAMILIES
from spmdtrain.config.published.read_config import as_published, read_published
from spmdtrain.config.published.toml import model_toml
from spmdtrain.config.published.write_config import as_model, function_of, write_config
from spmdtrain.config.schema import ExpertsConfig
from spmdtrain.interop.published_weights import Weights
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.running import loop
from spmdtrain.running.published import room
from spmdtrain.running.published.as_run import model_config
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model
from spmdtrain.running.published.read_weights import read_weights
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.external_arrays import from_layers
from spmdtrain.train.shard import shard

MESHES = {
    "fsdp 2 tensor 2 data 2": ("mesh.fsdp=2", "mesh.tensor=2", "mesh.data=2", "train.zero=1"),
    "pipeline 2 tensor 2": ("mesh.pipeline=2", "mesh.tensor=2"),
}
SHORT = "[train]\nsequence_length = 16\n"
FAMILIES = [*directories.CONFIGS]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory of each family."""
    folder = tmp_path_factory.mktemp("published")
    for name, config in directories.CONFIGS.items():
        directories.write(folder / name, config, parts=2 if name == "llama" else 1)
    return folder


def setup_of(folder, *overrides):
    """The setup of a published model on a mesh."""
    published, config = model_config(folder, overrides)
    count = int(np.prod([max(size, 1) for size in config.mesh.sizes.values()]))
    return published, shard(config, devices=jax.devices()[:count])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_imported_is_exported_as_it_was(family, published, tmp_path):
    """Names, shapes and bits of all tensors, from every family's table in both directions."""
    import_model(published / family, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", part=100_000)
    before, after = open_tensors(published / family), open_tensors(tmp_path / "out")
    assert (
        before.keys() == after.keys() == directories.tensors_of(directories.CONFIGS[family]).keys()
    )
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert np.array_equal(tensor.map(), after[name].map()), name
    came_out, went_in = (
        read_published(folder).settings for folder in (tmp_path / "out", published / family)
    )
    # The scale of longrope is written out, which transformers 4 would compute otherwise.
    assert function_of(as_model(came_out)) == function_of(as_model(went_in))
    assert came_out | {"rope_scaling": None} == went_in | {"rope_scaling": None}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.seconds
def test_any_mesh_holds_what_one_device_holds(family, mesh, published):
    """Padding of the vocabulary, of ZeRO and of the pipeline's layers is as a fresh model's."""
    said, setup = setup_of(published / family, *MESHES[mesh])
    params, _ = read_weights(setup, said)
    model = as_model(said.settings)
    shapes = {path: each for path, each in layer_shapes_on_one_device(published / family)}
    whole = Weights(said, model, shapes)
    layout = setup.model.stage_layout
    for path, x in params.items():
        assert (x.shape, x.dtype) == (
            setup.state.params[path].shape,
            setup.state.params[path].dtype,
        )
        assert x.sharding == setup.state.params[path].sharding
        index = tuple(slice(0, size) for size in shapes[path])
        if setup.model.in_stack(path):
            stack = np.stack([whole.read(path, layer, index) for layer in range(model.layers)])
            want = np.asarray(layout.staged(stack))
        else:
            want = whole.read(path, None, index)
        want = np.pad(want, [(0, a - b) for a, b in zip(x.shape, want.shape, strict=True)])
        assert np.array_equal(np.asarray(x), want), path


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.seconds
def test_devices_get_layer_by_layer_what_the_host_fills_in_place(mesh, published, monkeypatch):
    """Rounded to the run's dtype as well."""
    said, setup = setup_of(published / "llama", *MESHES[mesh], "precision.params=bfloat16")
    filled, _ = read_weights(setup, said)
    monkeypatch.setattr(from_layers, "_filled", from_layers._sent)
    sent, _ = read_weights(setup, said)
    assert {str(x.dtype) for x in sent.values()} == {"bfloat16"}
    for path, x in filled.items():
        assert (x.dtype, x.sharding) == (sent[path].dtype, sent[path].sharding)
        assert np.array_equal(np.asarray(x), np.asarray(sent[path])), path


def layer_shapes_on_one_device(folder):
    return from_layers.layer_shapes(setup_of(folder)[1]).items()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.seconds
def test_python_has_imported_weights_on_any_mesh(mesh, published, tmp_path):
    """`init_state` reads what `train.init_from` names: an imported run, or the folder itself."""
    run = tmp_path / "run"
    import_model(published / "llama", run)
    wanted = weights(run)
    (tmp_path / "c.toml").write_text(f"[model]\nfrom = {str(published / 'llama')!r}\n{SHORT}")
    for source, config in (
        (run, lambda asked: st.run_config(run, asked)),
        (published / "llama", lambda asked: load(tmp_path / "c.toml", asked)),
    ):
        asked = config([*MESHES[mesh], f"train.init_from={source}"])
        count = int(np.prod([max(size, 1) for size in asked.mesh.sizes.values()]))
        state = st.init_state(st.shard(asked, devices=jax.devices()[:count]))
        params = plain_arrays(st.shard(asked, devices=jax.devices()[:count]), state.params)
        assert int(state.step) == 0 and params.keys() == wanted.keys()
        assert all(np.array_equal(x, wanted[path]) for path, x in params.items())


def test_restore_says_that_an_imported_model_has_no_moments(published, tmp_path):
    import_model(published / "llama", tmp_path / "run")
    setup = st.shard(st.run_config(tmp_path / "run"), devices=jax.devices()[:1])
    with pytest.raises(CheckpointError, match=r"imported model.*init_state.*train.init_from="):
        st.restore(tmp_path / "run", setup)


def test_weights_that_python_asks_for_are_there_or_refused(tmp_path):
    setup = st.shard(tiny(f"train.init_from={tmp_path}"), devices=jax.devices()[:1])
    with pytest.raises(CheckpointError, match="train.init_from='.*' holds no checkpoint"):
        st.init_state(setup)


@pytest.mark.seconds
def test_a_run_on_a_mesh_exports_what_one_device_would(published, tmp_path):
    import_model(published / "llama", tmp_path / "run", overrides=MESHES["pipeline 2 tensor 2"])
    export_run(tmp_path / "run", tmp_path / "out")
    for name, tensor in open_tensors(published / "llama").items():
        assert np.array_equal(tensor.map(), open_tensors(tmp_path / "out")[name].map()), name


def test_an_export_reads_a_layer_at_a_time_where_layers_are_large(published, tmp_path, monkeypatch):
    """Each layer is then a chunk, and what is read is verified, padding of the pipeline too.

    An import also writes them one by one, the place that pads a stage included.
    """
    monkeypatch.setattr(store, "LAYERS_AT_ONCE", 0)
    written = []
    monkeypatch.setattr(by_layer, "_layers", recorded(by_layer._layers, written))
    import_model(published / "llama", tmp_path / "run", overrides=MESHES["pipeline 2 tensor 2"])
    stacked = [part for part in written if part.ndim > 2]
    assert len({part.shape for part in stacked}) > 2
    assert all(part.shape[:3] == (1, 1, 1) for part in stacked)
    blocks = []
    opened = layers._open
    monkeypatch.setattr(layers, "_open", lambda *place: blocks.append(place[1]) or opened(*place))
    export_run(tmp_path / "run", tmp_path / "out")
    up = "blocks.layer.mlp.up_ef"
    assert blocks.count(up) == 4  # three layers, and the place that pads the second stage
    for name, tensor in open_tensors(published / "llama").items():
        assert np.array_equal(tensor.map(), open_tensors(tmp_path / "out")[name].map()), name
    read = layers.Layers._layer

    def flipped(self, path, layer):
        found = read(self, path, layer).copy()
        found.flat[0] += (path, layer) == (up, 3)
        return found

    monkeypatch.setattr(layers.Layers, "_layer", flipped)
    with pytest.raises(CheckpointError, match="up_ef is damaged: its fingerprint differs"):
        export_run(tmp_path / "run", tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def recorded(layers_of, written: list):
    """Returns `layers_of` as it is, but what it yields is put into `written`."""

    def recording(shard, stacked):
        for index, part in layers_of(shard, stacked):
            written.append(part)
            yield index, part

    return recording


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ((room, "host_bytes", lambda: 1000), "do not fit into the memory.*found 0.0 MB"),
        ((room.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000)), "no room for the we"),
        ((room.os, "access", lambda *_: False), "cannot write"),
    ],
)
def test_what_an_import_lacks_is_said_before_a_number_is_read(
    lacking, said, published, tmp_path, monkeypatch
):
    monkeypatch.setattr(*lacking)
    monkeypatch.setattr(Weights, "read", lambda *_: pytest.fail("a number was read"))
    with pytest.raises(StorageError, match=said):
        import_model(published / "llama", tmp_path / "sub" / "run")
    assert not (tmp_path / "sub").exists()


@pytest.mark.seconds
def test_a_disk_that_is_full_while_step_0_is_written_is_one_line(published, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(by_layer, "write_by_layer", full)
    with pytest.raises(StorageError, match="cannot save a checkpoint: .*No space left"):
        import_model(published / "llama", tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


IMPORTING = """
import sys
from spmdtrain.processes.processes import simulate_devices, start
simulate_devices(1)
start(sys.argv[1], 2, int(sys.argv[2]))
from spmdtrain.running.published.import_model import import_model
import_model(*sys.argv[3:], overrides=("mesh.fsdp=2",))
"""


@pytest.mark.long
def test_two_processes_import_one_directory_as_one_does(published, tmp_path):
    """Each reads its own parts, and the step that they write together is the same to the bit."""
    import_model(published / "llama", tmp_path / "one")
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    paths = [str(published / "llama"), str(tmp_path / "two")]
    command = [sys.executable, "-c", IMPORTING, address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"XLA_FLAGS": CHEAP_FLAGS}
    both = [
        subprocess.Popen([*command, str(number), *paths], env=environment, **pipes)
        for number in (0, 1)
    ]
    said = [each.communicate(timeout=300)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for path, x in one.items():
        assert x.dtype == two[path].dtype and np.array_equal(x, two[path]), path
    writers = (tmp_path / "two" / "checkpoints" / "0" / "params").glob("ocdbt.process_*")
    assert len([*writers]) == 2


@pytest.mark.long
def test_two_processes_write_files_of_their_own(published, tmp_path):
    """Or both find the damage of a layer that one of them reads, and leave nothing."""
    import_model(published / "llama", tmp_path / "run", overrides=MESHES["pipeline 2 tensor 2"])
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]

    def export(out: str) -> list[tuple[int, str]]:
        words = ["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / out)]
        words += ["--part", "50KB", "--coordinator", f"localhost:{port}", "--processes", "2"]
        command = [sys.executable, "-m", "spmdtrain.cli", *words, "--process"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        both = [subprocess.Popen([*command, str(number)], **pipes) for number in (0, 1)]
        said = [each.communicate(timeout=120)[0] for each in both]
        return [(each.returncode, text) for each, text in zip(both, said, strict=True)]

    assert [code for code, _ in export("out")] == [0, 0]
    before, after = open_tensors(published / "llama"), open_tensors(tmp_path / "out")
    assert len({tensor.path for tensor in after.values()}) > 4
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert np.array_equal(tensor.map(), after[name].map()), name
    for path in (tmp_path / "run" / "checkpoints" / "0" / "params").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    for code, text in export("damaged"):
        assert (code, "is damaged" in text) == (6, True), text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.long
def test_means_of_adapters_are_those_of_the_merged_weights(published, tmp_path):
    """Over steps, where the product of two means would be another matrix; and averages of both
    runs, where the newest weights of the second would be another adapter.
    """
    lora = ("finetune.kind=lora", "finetune.rank=2", "finetune.alpha=6.0", "optimizer.ema=0.5")
    saved = ("train.steps=3", "eval.every=0", "checkpoint.every=1", "checkpoint.keep=9")
    config = load_tiny(tmp_path, published / "llama", *lora, *saved)
    run, twin = tmp_path / "run", tmp_path / "twin"
    loop.run(config, run, devices=jax.devices()[:1])
    shutil.copytree(run, twin)

    def exported(out: str, **asked) -> np.ndarray:
        export_run(run, tmp_path / out, dtype="float32", **asked)
        return open_tensors(tmp_path / out)["model.layers.0.mlp.down_proj.weight"].map()

    steps = [1, 3]
    of_steps = [exported(f"step{step}", step=step).astype(np.float64) for step in steps]
    mean = exported("mean", average=steps)
    np.testing.assert_allclose(mean, np.mean(of_steps, 0), rtol=1e-6, atol=1e-9)

    base = open_tensors(published / "llama")["model.layers.0.mlp.down_proj.weight"].map()
    newest = exported("newest")
    once, twice = exported("once", ema=True), exported("twice", ema=True, also=[twin])
    assert np.abs(once - newest).max() > 1e-5
    np.testing.assert_allclose(twice - base, 2 * (once - base), rtol=1e-3, atol=1e-7)


@pytest.mark.long
def test_adapters_are_merged_with_the_weights_that_were_quantised(published, tmp_path):
    """Those of the published folder, exactly; and the adapters of several runs add up."""
    run, twin = tmp_path / "run", tmp_path / "twin"
    few_bits = ("finetune.kind=lora", "finetune.base=int8", "finetune.rank=2", "finetune.alpha=6.0")
    config = load_tiny(tmp_path, published / "llama", *few_bits, "eval.every=0")
    loop.run(config, run, devices=jax.devices()[:1])
    shutil.copytree(run, twin)
    with pytest.raises(ConfigError, match="holds only quantised ones.*try --base DIR"):
        export_run(run, tmp_path / "out")
    directories.write(
        tmp_path / "other",
        directories.CONFIGS["llama"],
        {name: 1 - x.map() for name, x in open_tensors(published / "llama").items()},
    )
    with pytest.raises(CheckpointError, match="belong to another model than .*other"):
        export_run(run, tmp_path / "out", base=tmp_path / "other")
    export_run(run, tmp_path / "once", base=published / "llama")
    export_run(run, tmp_path / "twice", base=published / "llama", also=[twin])
    before = open_tensors(published / "llama")
    once, twice = open_tensors(tmp_path / "once"), open_tensors(tmp_path / "twice")
    held = weights(run)
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        a, b = (held[f"blocks.layer.mlp.down_fe.down.{part}"][layer] for part in "ab")
        added = 3 * (a @ b).T
        assert np.abs(added).max() > 1e-5
        want = before[name].map() + added
        np.testing.assert_allclose(once[name].map(), want, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(twice[name].map(), want + added, rtol=1e-6, atol=1e-7)
        norm = f"model.layers.{layer}.input_layernorm.weight"
        assert np.array_equal(once[norm].map(), before[norm].map())


# --- settings and keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_says_the_same_when_it_is_written_anew(family):
    """Without the file of the import: a model that was trained here and is of a family."""
    said = as_published(Path(), dict(directories.CONFIGS[family]))
    model = as_model(said.settings)
    _, keys = write_config(model, None, dtype="bfloat16", tokens={}, run=None)
    assert function_of(as_model(as_published(Path(), keys).settings)) == function_of(model)
    assert keys["dtype"] == keys["torch_dtype"] == "bfloat16"


def test_no_family_fails_to_write_a_model_of_another():
    """An export without an import asks one after another which of them computes the model."""
    for keys in (*directories.CONFIGS.values(), *directories.VARIANTS.values()):
        model = as_model(as_published(Path(), dict(keys)).settings)
        for family in KNOWN_FAMILIES.values():
            family.write(model)


NEW_SHAPE = directories.VARIANTS["llama, tied, by rope_parameters"]


@pytest.mark.parametrize("config", [directories.CONFIGS["qwen2"], NEW_SHAPE], ids=["old", "new"])
@pytest.mark.parametrize("imported", [True, False])
def test_rope_is_written_for_transformers_4_and_5(config, imported):
    """transformers 4 ignores `rope_parameters` without a word, and takes theta 10,000."""
    said = as_published(Path(), config)
    model = as_model(said.settings)
    base = said if imported else None
    _, keys = write_config(model, base, dtype="float32", tokens={}, run=Path())
    assert keys["rope_theta"] == keys["rope_parameters"]["rope_theta"] == 500.0


@pytest.mark.parametrize("outer", [True, False, None])
def test_a_wrapper_of_ministral_ties_its_head_by_its_outer_key(outer, tmp_path):
    """As its class does, whatever the text part says; its vision tower is left out."""
    text = directories.CONFIGS["ministral3"] | {"tie_word_embeddings": outer is False}
    config = {"model_type": "mistral3", "text_config": text, "dtype": "float32"}
    config |= {} if outer is None else {"tie_word_embeddings": outer}
    tied = outer is not False
    whole = directories.drawn(directories.tensors_of(text | {"tie_word_embeddings": tied}))
    tensors = {f"language_model.{name}": x for name, x in whole.items()}
    tensors["vision_tower.ln_pre.weight"] = np.ones(4, np.float32)
    directories.write(tmp_path / "model", config, tensors)
    imported = import_model(tmp_path / "model", tmp_path / "run")
    model = imported.setup.config.model
    assert (model.tied, model.temperature is None) == (tied, False)
    assert ("unembed_ve" in imported.params) == (not tied)
    export_run(tmp_path / "run", tmp_path / "out")
    keys = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (keys["model_type"], keys["tie_word_embeddings"]) == ("ministral3", tied)


# Every setting of a model that changes what it computes, and another value of it.
OTHER = {
    "layers": 3,
    "embed": 64,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 100,
    "vocab": 65,
    "max_length": 33,
    "positions": "learned",
    "norm": "layernorm",
    "mlp": "geglu",
    "bias": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
    "rope_theta": 5.0,
    "rope_layers": (True, False),
    "rope_share": 0.5,
    "rope_scaling": {"kind": "linear", "factor": 2.0},
    "windows": (8, 0),
    "chunks": (8, 0),
    "score_scale": 0.5,
    "score_cap": 5.0,
    "sinks": True,
    "query_norm": "head",
    "output_gate": "channel",
    "norm_epsilon": 1e-3,
    "norm_places": "after",
    "norm_offset": 1.0,
    "embed_scale": "sqrt",
    "residual_scale": 0.5,
    "logit_scale": 0.5,
    "logit_cap": 5.0,
    "mlps": ("mlp", "none"),
    "mlp_gate_factor": 2.0,
    "mlp_out_factor": 2.0,
    "experts": {"count": 4, "chosen": 2},
    "value_norm": True,
    "layer_scale": True,
    "full": {"head_dim": 16},
    "shared_keys": 1,
    "token_layers": {"dim": 4},
    "latent": {"rank": 8, "plain_dim": 6, "rope_dim": 2, "value_dim": 8},
    "multi_token": {"depth": 1},
    "temperature": {"weight": 0.1, "length": 16},
    "mup_base": 16,
}
CHANGE_NO_FUNCTION = {
    "idle_keys",
    "name",
    "dropout",
    "attention",
    "context_attention",
    "make",
    "extra",
}
OTHER_OF_EXPERTS = {
    "count": 16,
    "chosen": 2,
    "ffn": 24,
    "shared": 1,
    "shared_ffn": 40,
    "shared_gate": True,
    "own_norms": True,
    "learned_scale": True,
    "width": 12,
    "smallest_sum": 0.5,
    "sum_epsilon": 0.3,
    "gate_input": True,
    "first_dense": 1,
    "every": 2,
    "score": "sigmoid",
    "normalise": False,
    "scale": 2.0,
    "logit_bias": True,
    "groups_kept": 2,
    "groups": 2,
    "bias_rate": 0.0,
}
# Tables of mixers: for each, its settings and others of them.
OTHER_OF_MIXERS = {
    "delta": (
        {"key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 4, "decay": "channel"},
        {
            "key_heads": 4,
            "value_heads": 2,
            "key_dim": 6,
            "value_dim": 6,
            "taps": 2,
            "decay": "head",
            "decay_rank": 3,
            "rate": 2,
            "gate": "sigmoid",
            "gate_rank": 3,
            "epsilon": 1e-3,
            "norm_places": "after",
        },
    ),
    "ssd": (
        {"heads": 4, "head_dim": 4},
        {
            "heads": 8,
            "head_dim": 6,
            "groups": 2,
            "state": 8,
            "taps": 2,
            "taps_bias": False,
            "norm": "none",
            "norm_first": True,
            "epsilon": 1e-3,
            "smallest_step": 0.1,
            "largest_step": 1.0,
            "factors": (1.0, 1.0, 1.0, 1.0, 2.0),
            "in_factor": 2.0,
            "out_factor": 2.0,
        },
    ),
    "conv": ({}, {"taps": 2, "bias": True}),
    "both": ({}, {"in_factor": 2.0, "out_factor": 2.0}),
}
OTHER_OF_FULL = {"head_dim": 4, "kv_heads": 2, "keys_are_values": True}
# How a router is trained, and how tokens travel.
OF_TRAINING = {"balance", "balance_over", "z_loss", "jitter", "bucket_factor"}


def test_no_setting_of_a_model_is_lost_on_the_way_out():
    """An export is compared with its run by `function_of`: it must see every setting."""
    plain = {"name": "llama", "layers": 2, "embed": 32, "heads": 4, "vocab": 64, "max_length": 32}
    fields = set(type(as_model(plain)).model_fields)
    tables = OTHER_OF_MIXERS.keys() | {"mixers", "indexer", "shared_ffn"}
    assert fields == OTHER.keys() | CHANGE_NO_FUNCTION | tables | {"rope_theta_window"}
    of_plain = function_of(as_model(plain))
    for name, value in OTHER.items():
        assert function_of(as_model(plain | {name: value})) != of_plain, name
    sharing = plain | {"shared_keys": 1}
    assert function_of(as_model(sharing | {"shared_ffn": 7})) != function_of(as_model(sharing))
    windowed = plain | {"windows": (8, 0)}
    other = function_of(as_model(windowed | {"rope_theta_window": 5.0}))
    assert other != function_of(as_model(windowed))


def test_no_setting_of_full_layers_is_lost_on_the_way_out():
    plain = {"name": "llama", "layers": 2, "embed": 32, "heads": 4, "vocab": 64, "windows": (8, 0)}
    model = as_model(plain | {"full": {}})
    assert set(type(model.full).model_fields) == OTHER_OF_FULL.keys()
    for name, value in OTHER_OF_FULL.items():
        assert function_of(as_model(plain | {"full": {name: value}})) != function_of(model), name


@pytest.mark.parametrize("mixer", OTHER_OF_MIXERS)
def test_no_setting_of_mixers_is_lost_on_the_way_out(mixer):
    usual, others = OTHER_OF_MIXERS[mixer]
    plain = {"name": "llama", "layers": 2, "embed": 32, "heads": 4, "vocab": 64}
    plain |= {"ssd": OTHER_OF_MIXERS["ssd"][0]} if mixer == "both" else {}
    before = function_of(as_model(plain | {"mixers": (mixer, "attention"), mixer: usual}))
    assert function_of(as_model(plain | {"mixers": (mixer,), mixer: usual})) != before
    table = getattr(as_model(plain | {"mixers": (mixer,), mixer: usual}), mixer)
    assert set(type(table).model_fields) == others.keys()
    for name, value in others.items():
        other = {"mixers": (mixer, "attention"), mixer: usual | {name: value}}
        assert function_of(as_model(plain | other)) != before, name


def test_no_setting_of_experts_is_lost_on_the_way_out():
    plain = {"name": "llama", "layers": 2, "embed": 32, "heads": 4, "vocab": 64}
    experts = {"count": 8, "chosen": 3, "groups": 4, "groups_kept": 3}
    assert set(ExpertsConfig.model_fields) == OTHER_OF_EXPERTS.keys() | OF_TRAINING
    more = {"groups": {"groups_kept": 2}}
    more |= dict.fromkeys(("shared_ffn", "shared_gate", "own_norms"), {"shared": 1})
    for name, value in OTHER_OF_EXPERTS.items():
        usual = experts | more.get(name, {})
        before = function_of(as_model(plain | {"experts": experts if name == "groups" else usual}))
        other = {"experts": usual | {name: value}}
        assert function_of(as_model(plain | other)) != before, name


@pytest.mark.seconds
def test_what_was_changed_on_top_is_in_the_exported_config(published, tmp_path):
    overrides = ["model.vocab=160", "model.max_length=32", "model.tied=false"]
    import_model(published / "gpt2", tmp_path / "run", overrides=overrides)
    export_run(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    keys = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (keys["vocab_size"], keys["n_positions"]) == (160, 32)
    assert keys["tie_word_embeddings"] is False
    assert keys["dtype"] == keys["torch_dtype"] == "bfloat16"
    tensors = open_tensors(tmp_path / "out")
    embed = open_tensors(published / "gpt2")["transformer.wte.weight"].map()
    grown = tensors["transformer.wte.weight"].map()
    assert np.array_equal(grown[:131], embed.astype(grown.dtype))
    mean = embed.mean(0, np.float64).astype(grown.dtype)
    assert np.array_equal(grown[131:], np.broadcast_to(mean, (29, 48)))
    assert np.array_equal(tensors["lm_head.weight"].map(), grown)


@pytest.mark.seconds
def test_experts_of_four_bits_are_read(tmp_path):
    """A byte holds two numbers, the first in its low half; 32 of a row share a power of 2."""
    config = directories.CONFIGS["gpt_oss"] | {"num_hidden_layers": 1, "hidden_size": 96}
    config["layer_types"] = config["layer_types"][:1]
    tensors = directories.drawn(directories.tensors_of(config))
    random = np.random.default_rng(3)
    wanted = {}
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.0.mlp.experts.{name}"
        count, ins, outs = tensors.pop(path).shape
        blocks = random.integers(0, 256, (count, outs, ins // 32, 16), np.uint8)
        scales = random.integers(120, 130, (count, outs, ins // 32), np.uint8)
        tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
        wanted[name] = np.zeros((count, ins, outs))
        for x, out, block, byte in np.ndindex(blocks.shape):
            for half in (0, 1):
                bits = (int(blocks[x, out, block, byte]) >> (4 * half)) & 15
                size = [0, 0.5, 1, 1.5, 2, 3, 4, 6][bits & 7] * (-1 if bits & 8 else 1)
                column = 32 * block + 2 * byte + half
                wanted[name][x, column, out] = size * 2.0 ** (int(scales[x, out, block]) - 127)
    quantised = config | {"quantization_config": {"quant_method": "mxfp4"}}
    directories.write(tmp_path / "packed", quantised, tensors)
    found = import_model(tmp_path / "packed", tmp_path / "run").params
    up_xeu = np.asarray(found["blocks.layer.mlp.up_xeu"][0])
    assert np.array_equal(up_xeu[:, :, 0], wanted["gate_up_proj"][:, :, ::2])
    assert np.array_equal(up_xeu[:, :, 1], wanted["gate_up_proj"][:, :, 1::2])
    assert np.array_equal(found["blocks.layer.mlp.down_xfe"][0], wanted["down_proj"])


# --- training from it -----------------------------------------------------------------------------


def test_a_config_takes_its_model_from_a_directory_or_a_run(published, tmp_path):
    file = tmp_path / "c.toml"
    import_model(published / "llama", tmp_path / "run")
    said = read_published(published / "llama").settings
    for source in (published / "llama", tmp_path / "run"):
        file.write_text(
            f'[model]\nfrom = "{source}"\ndropout = 0.5\n[train]\nsequence_length = 16\n'
        )
        config = load(file)
        assert function_of(config.model) == function_of(as_model(said))
        assert config.model.dropout == 0.5
        assert "model.from" in config.origin["model.layers"]
    below = tmp_path / "below.toml"
    below.write_text(f"[model]\nname = 'llama'\nsinks = true\n{SHORT}")
    file.write_text(f'extends = "below.toml"\n[model]\nfrom = "{published / "llama"}"\n')
    assert load(file).model.sinks is False  # of another model
    file.write_text(SHORT)
    assert load(file, [f"model.from={source}", "model.layers=2"]).model.layers == 2


def test_a_step_0_of_weights_is_no_run_to_resume(published, tmp_path):
    from spmdtrain.running.loop import run

    import_model(published / "llama", tmp_path / "run")
    assert weights(tmp_path / "run")["norm.scale_e"].shape == (48,)
    config = load_tiny(tmp_path, published / "llama")
    with pytest.raises(CheckpointError, match="holds an imported model: step 0"):
        run(config, tmp_path / "run", devices=jax.devices()[:1])


def load_tiny(folder, source, *overrides):
    file = folder / "tiny.toml"
    file.write_text(
        f'[model]\nfrom = "{source}"\n[train]\ninit_from = "{source}"\nsteps = 1\n'
        'global_batch = 2\nsequence_length = 16\n[data]\ncorpus = "synthetic"\n'
        "[eval]\nevery = 1\nbatches = 1\n[optimizer]\nwarmup = 0\nlearning_rate = 1e-3\n"
    )
    return load(file, overrides)


@pytest.mark.seconds
def test_training_begins_with_the_weights_of_a_directory_and_takes_its_files_along(
    published, tmp_path
):
    from spmdtrain.running.loop import run

    (published / "llama" / "LICENSE").write_text("free")
    run(load_tiny(tmp_path, published / "llama"), tmp_path / "run", devices=jax.devices()[:1])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert first["step"] == 0  # what the published model predicts, before a step changes it
    assert first["eval_loss"] > 4
    export_run(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    before, after = open_tensors(published / "llama"), open_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    moved = [np.abs(before[name].map() - after[name].map()).max() for name in before]
    assert 0 < max(moved) < 0.01


def test_settings_that_compute_something_else_are_refused(published, tmp_path):
    from spmdtrain.running.loop import run

    file = tmp_path / "by_hand.toml"
    text = model_toml(published / "llama").replace("rope_theta = 500.0\n", "")
    file.write_text(f"{text}\n{SHORT}")
    by_hand = load(file).model
    config = load_tiny(tmp_path, published / "llama").model_copy(update={"model": by_hand})
    config._origin = {"model.name": str(file)}
    with pytest.raises(ConfigError, match="does not compute what.*rope_theta"):
        run(config, tmp_path / "run", devices=jax.devices()[:1])


# --- what is refused ------------------------------------------------------------------------------


def test_an_export_never_writes_into_what_is_there(published, tmp_path):
    import_model(published / "gpt2", tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(StorageError, match="out is not empty; found mine; try another folder"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_model_of_no_family_is_not_exported_as_another():
    model = as_model({"name": "gpt", "vocab": 64, "max_length": 32, "norm": "rmsnorm"})
    with pytest.raises(ConfigError, match="norm='rmsnorm' belongs to no family"):
        write_config(model, None, dtype="float32", tokens={}, run="runs/x")


@pytest.mark.core
@pytest.mark.seconds
def test_a_run_exports_its_checkpoints_while_it_trains(tmp_path):
    """Each second one and the last, as `export` writes them, though but one checkpoint is kept."""
    every = ("checkpoint.every=2", "checkpoint.keep=1", "checkpoint.export=2", "train.steps=6")
    small = ("model.name=llama", "model.layers=1", "model.embed=16", "model.heads=2")
    config = tiny(*small, *every)
    run = tmp_path / "run"
    loop.run(config, run, devices=jax.devices()[:1])
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["4", "6"]
    export_run(run, tmp_path / "after")
    last = open_tensors(run / "exports" / "6")
    for name, tensor in open_tensors(tmp_path / "after").items():
        assert np.array_equal(tensor.map(), last[name].map())
    assert (run / "exports" / "4" / "config.json").read_bytes() == (
        tmp_path / "after" / "config.json"
    ).read_bytes()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [each["step"] for each in events if each["event"] == "exported"] == [4, 6]


@pytest.mark.seconds
def test_exports_of_abandoned_steps_are_set_aside(tmp_path, capsys):
    small = ("model.name=llama", "model.layers=1", "model.embed=16", "model.heads=2")
    every = ("checkpoint.every=2", "checkpoint.keep=9", "checkpoint.export=1")
    run, one = tmp_path / "run", jax.devices()[:1]
    loop.run(tiny(*small, *every, "train.steps=6"), run, devices=one)
    exports = run / "exports"
    assert sorted(path.name for path in exports.iterdir()) == ["2", "4", "6"]
    (exports / "6" / "config.json").write_text("of the abandoned step")

    loop.run(tiny(*small, *every, "train.steps=4"), run, devices=one, step=2)
    said = "exports of the abandoned steps 4, 6 are now in exports/quarantine"
    assert said in capsys.readouterr().out
    assert sorted(path.name for path in exports.iterdir()) == ["2", "4", "quarantine"]
    assert sorted(path.name for path in (exports / "quarantine").iterdir()) == ["4", "6"]
    assert (exports / "quarantine/6/config.json").read_text() == "of the abandoned step"


@pytest.mark.seconds
def test_a_run_of_no_family_is_not_begun_with_exports(tmp_path):
    odd = ("model.norm=rmsnorm", "checkpoint.export=1", "train.steps=1")
    with pytest.raises(ConfigError, match="belongs to no family"):
        loop.run(tiny(*odd), tmp_path, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("more", "missing", "line"),
    [
        (["--out", "run"], "transformers", "transformers is not installed; try pip install torch"),
        (["--out", "run"], "torch", "torch is not installed; try pip install torch"),
        (["--print-config"], "", "--print-config reads none; try one of them at a time"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused_before_the_import(
    published, tmp_path, monkeypatch, capsys, more, missing, line
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == missing else name)
    assert main(["import", str(published / "llama"), "--check", *more]) == 4
    told = capsys.readouterr()
    assert line in told.err and told.out == "" and not Path("run").exists()
