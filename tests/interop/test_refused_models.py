"""What is no model that can be read is refused in one line, before a number is read."""

import json
import pickle
import re
import shutil
from pathlib import Path

import directories
import numpy as np
import pytest
from helpers import described_run
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from spmdtrain.cli import main
from spmdtrain.config import RunConfig
from spmdtrain.config.errors import CheckpointError, ConfigError, UserError
from spmdtrain.config.published.read_config import as_published, read_published, refuse_untied
from spmdtrain.config.published.toml import model_toml
from spmdtrain.config.published.write_config import as_model
from spmdtrain.interop.pieces import Shape
from spmdtrain.interop.published_weights import Weights
from spmdtrain.interop.safetensors_files import open_file, open_tensors
from spmdtrain.running.published.as_run import described, model_config

LLAMA = directories.CONFIGS["llama"]


@pytest.fixture
def folder(tmp_path):
    """A whole model, to be damaged."""
    directories.write(tmp_path / "m", LLAMA)
    return tmp_path / "m"


def shapes_of(model) -> dict[str, Shape]:
    """The shapes of the parameters of a small Llama, by hand: no jax is needed."""
    embed, heads, dim, ffn = model.embed, model.kv_heads, model.head_dim, model.ffn
    slots = model.heads // heads + 2
    found = {
        "tokens.table_ve": (model.vocab, embed),
        "norm.scale_e": (embed,),
        "blocks.layer.attention.qkv_eknd": (embed, heads, slots, dim),
        "blocks.layer.attention.out_kgde": (heads, slots - 2, dim, embed),
        "blocks.layer.mlp.up_ef": (embed, 2, ffn),
        "blocks.layer.mlp.down_fe": (ffn, embed),
        "blocks.layer.attention_norm.scale_e": (embed,),
        "blocks.layer.mlp_norm.scale_e": (embed,),
    }
    return found if model.tied else found | {"unembed_ve": (model.vocab, embed)}


def opened(folder, ignored=(), **changes) -> Weights:
    published = read_published(folder)
    model = as_model(published.settings | changes)
    return Weights(published, model, shapes_of(model), ignored)


def rewrite(folder, **changes) -> None:
    """Changes keys of config.json; None takes one away."""
    keys = LLAMA | changes
    text = json.dumps({key: value for key, value in keys.items() if value is not None})
    (folder / "config.json").write_text(text)


def with_tensors(folder, change) -> None:
    tensors = directories.drawn(directories.tensors_of(LLAMA))
    change(tensors)
    directories.write(folder, LLAMA, tensors)


# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model_type": "qwen4_exp", "layer_types": ["linear_attention"]},
            "model_type 'qwen4_exp' is not supported; found linear_attention in layer_types; "
            "try one of gpt2, llama,",
        ),
        ({"model_type": None}, "names no model_type"),
        (
            {"residual_multiplier": 0.22},
            "config.json: residual_multiplier=0.22 has no setting here; found model_type='llama'; "
            "try another model",
        ),
        ({"hidden_act": "relu"}, "hidden_act='relu' has no setting here"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' depends on the length of each sequence; try a model with linear",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}}, "rope: odd=1 has no"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a number"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "must be a list of 3 kinds",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "'sliding_attention'] has no setting"),
        # What the class of the family does not read says nothing about its weights.
        ({"partial_rotary_factor": 0.5}, "transformers' class of llama turns all channels"),
        (
            {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "transformers' class of llama turns all channels",
        ),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias=True has no setting here"),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 5.0},
            "attn_logit_softcapping=5.0 has no setting here",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type='linear' has no setting here",
        ),
    ],
)
def test_a_config_that_means_something_else_is_refused(changes, line, folder):
    rewrite(folder, **changes)
    with pytest.raises(ConfigError) as refused:
        read_published(folder)
    assert line in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_that_torch_does_not_have_is_refused(name, folder):
    plain = {"dtype": None, "torch_dtype": None}
    for said, meant in (
        *(("bfloat16", "bfloat16"), ("torch.float16", "float16"), (None, None)),
        *(("float8_e4m3fn", None), ("float64", None)),
    ):
        rewrite(folder, **plain | {name: said})
        assert read_published(folder).dtype == meant
    for odd in ("float99", "", "BF16", 16, ["float32"], {}):
        rewrite(folder, **plain | {name: odd})
        with pytest.raises(ConfigError, match=f"{name}=.* must be float32, bfloat16, .*; try the"):
            read_published(folder)


def test_a_folder_without_config_json_is_said_to_be_that(folder):
    (folder / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"m is not a Hugging Face directory: config.json: No such"
    ):
        read_published(folder)


def test_an_adapter_alone_is_said_to_be_that(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ConfigError, match=r"m is an adapter of peft.* try .*merge_and_unload"):
        read_published(folder)


def test_quantised_weights_are_no_matrices_to_train(folder):
    rewrite(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"is quantised \(gptq, 4 bits\): its weights"):
        read_published(folder)


def test_code_of_a_directory_is_never_run(folder, tmp_path):
    """A known type with code of its own is read as that type, with a line."""
    rewrite(folder, auto_map={"AutoModelForCausalLM": "own.Model"})
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    published = read_published(folder)
    assert "contains code, which is not run" in published.remarks[0]
    opened(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("values", ["null", "[]", '{"a":' * 10_000, "{", '"text"', "{}"])
def test_what_is_no_table_of_json_is_one_line(values, folder):
    (folder / "config.json").write_text(values)
    with pytest.raises(ConfigError):
        read_published(folder)


def test_defaults_of_absent_keys_are_those_of_the_family():
    """INTEROP 1.3: not ours, and not the same in two families."""
    absent = ("rope_theta", "sliding_window", "head_dim", "tie_word_embeddings", "rms_norm_eps")
    kept = {key: value for key, value in LLAMA.items() if key not in (*absent, "rope_scaling")}

    def of(family, **more):
        return as_published(Path(), kept | {"model_type": family} | more).settings

    assert of("llama")["rope_theta"] == 10_000
    assert of("smollm3")["rope_theta"] == 2e6
    assert of("olmo3")["rope_theta"] == 5e5
    assert of("mistral")["windows"] == [4096]
    assert "windows" not in of("mistral", sliding_window=None)
    assert of("qwen3")["head_dim"] == 128
    assert of("gemma2")["tied"] is True and of("llama")["tied"] is False
    assert (of("gemma2")["score_cap"], of("gemma2")["logit_cap"]) == (50, 30)
    assert of("gemma3_text")["rope_theta_window"] == 10_000
    assert "windows" not in of("qwen2", sliding_window=7)
    late = of("qwen2", sliding_window=7, use_sliding_window=True, max_window_layers=1)
    assert late["windows"] == [0, 7, 7]


def test_rope_parameters_win_over_the_keys_of_transformers_4():
    """And `su` of early files is longrope."""
    new = {"rope_type": "default", "rope_theta": 7.0}
    keys = LLAMA | {"rope_parameters": new, "rope_scaling": None}
    assert as_published(Path(), keys).settings["rope_theta"] == 7.0
    phi = directories.CONFIGS["phi3"]
    early = phi | {"rope_scaling": phi["rope_scaling"] | {"type": "su"}}
    assert as_published(Path(), early).settings == as_published(Path(), phi).settings


def test_a_longer_sequence_names_the_settings_that_stretch_a_model():
    model = {"name": "llama", "max_length": 40960, "vocab": 64}
    with pytest.raises(ConfigError, match=r"kind=yarn --set model.rope_scaling.factor=2"):
        RunConfig(model=model, train={"sequence_length": 65536})


def test_a_longer_max_length_than_the_model_s_needs_a_scaling(folder):
    """The settings that the line names are taken, as they are written."""
    longest = LLAMA["max_position_embeddings"]
    with pytest.raises(ConfigError, match=f"reads at most {longest} tokens") as refused:
        model_toml(folder, [f"model.max_length={longest + 1}"])
    with pytest.raises(ConfigError, match="reads at most"):
        model_config(folder, [f"model.max_length={longest + 1}"])
    named = str(refused.value).partition("; try ")[2].removeprefix("--set ").split(" --set ")
    _, config = model_config(folder, [f"model.max_length={longest + 1}", *named])
    assert config.model.rope_scaling.original_length == longest


# --- files ----------------------------------------------------------------------------------------


def test_pickles_alone_are_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, whose reading would run code"):
        opened(folder)


def test_an_index_that_names_a_missing_file(folder):
    (folder / "model.safetensors").unlink()
    directories.write(folder, LLAMA, parts=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index.json names model-00002.*; found model-00001"):
        opened(folder)


def test_an_index_that_says_otherwise_than_its_files(folder):
    (folder / "model.safetensors").unlink()
    directories.write(folder, LLAMA, parts=2)
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    name = next(iter(said["weight_map"]))
    said["weight_map"]["made.up"] = said["weight_map"].pop(name)
    index.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=f"holds {name}, which"):
        opened(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(CheckpointError, match="is not a file name"):
        opened(folder)


@pytest.mark.parametrize("pattern", ["nothing.*", "model.norm.weight"])
def test_what_is_left_out_is_there_and_not_read(pattern, folder):
    with_tensors(folder, lambda tensors: tensors.update(odd=np.zeros(1, np.float32)))
    opened(folder, ["od*"])
    with pytest.raises(CheckpointError, match=f"holds no {re.escape(pattern)} that nothing reads"):
        opened(folder, ["odd", pattern])


def test_a_pointer_of_git_lfs_is_said_to_be_that(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(
        CheckpointError,
        match=r"^\S+m/model.safetensors is only a git-lfs pointer, \d+ bytes; try git lfs pull",
    ):
        opened(folder)


def test_bytes_behind_the_data_and_a_short_file_are_damage(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    said = f"its header says {len(whole):,} bytes; found"
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match=said):
        opened(folder)
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=said):
        opened(folder)


@given(data=st.data())
@settings(max_examples=150)
def test_no_damage_of_a_header_is_anything_but_a_line(data, tmp_path_factory):
    """Cut anywhere, or with other bytes in its header: one line, or the same tensors as before."""
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "model.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float16)}, path)
    before = {name: (each.shape, each.dtype) for name, each in open_file(path).items()}
    whole = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(whole[:8], "little")
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(CheckpointError):
            open_tensors(folder)
        return
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        after = open_tensors(folder)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert len(after) == len(before)
    for tensor in after.values():
        assert tensor.map().size == 6  # whatever it is called now, it lies in the file


def test_integers_are_no_weights(folder):
    with_tensors(folder, lambda tensors: tensors.update(extra=np.zeros(3, np.int64)))
    with pytest.raises(CheckpointError, match="extra of .* has dtype I64; found quantised weights"):
        opened(folder)


# --- tensors --------------------------------------------------------------------------------------


def test_a_missing_tensor_and_one_too_many(folder):
    gone = [f"model.layers.2.mlp.{name}_proj.weight" for name in ("up", "down")]
    with_tensors(folder, lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(CheckpointError, match=r"lacks model.layers.2.mlp.\w+.weight and 1 more;"):
        opened(folder)
    directories.write(folder, LLAMA)
    with pytest.raises(CheckpointError, match=r"holds model.layers.2.*and 8 more; asked 2 layers"):
        opened(folder, layers=2)
    assert len(opened(folder, ["model.layers.2.*"], layers=2).tensors) == 21


def test_a_tensor_of_another_shape_names_the_settings_that_ask_for_it(folder):
    with pytest.raises(CheckpointError) as refused:
        opened(folder, kv_heads=6)
    assert "k_proj.weight of" in str(refused.value)
    assert "has the shape [32, 48]; asked [96, 48] by embed=48" in str(refused.value)


def test_the_rows_of_the_file_are_the_vocabulary(folder):
    rewrite(folder, vocab_size=140)
    with pytest.raises(CheckpointError) as refused:
        opened(folder)
    assert "has 131 rows; asked vocab_size=140; try --set model.vocab=131" in str(refused.value)


def test_a_tied_head_is_the_embedding_or_refused(folder):
    rewrite(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="is true, but lm_head.weight differs from.*--untie"):
        opened(folder)
    assert len(opened(folder, tied=False).tensors) == 30

    def same(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    with_tensors(folder, same)
    rewrite(folder, tie_word_embeddings=True)
    assert len(opened(folder).tensors) == 30  # read, and found to be the embedding
    refuse_untied(folder)
    with_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(
        CheckpointError, match="but lm_head.weight is missing; try --set model.tied"
    ):
        opened(folder)
    assert len(opened(folder, tied=True).tensors) == 29
    with pytest.raises(ConfigError, match="already has"):
        refuse_untied(folder)


def test_older_spellings_are_read(tmp_path):
    """GPT-2's own file has no prefix, and holds masks."""
    gpt2 = directories.CONFIGS["gpt2"]
    tensors = directories.drawn(directories.tensors_of(gpt2))
    bare = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    directories.write(tmp_path / "gpt2", gpt2, bare)
    published = read_published(tmp_path / "gpt2")
    model = as_model(published.settings)
    shapes = {"tokens.table_ve": (131, 48)}
    found = Weights(published, model, shapes, ["h.*", "ln_f.*", "wpe.*"])
    whole = (slice(0, 131), slice(0, 48))
    assert np.array_equal(
        found.read("tokens.table_ve", None, whole), tensors["transformer.wte.weight"]
    )


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.seconds
def test_the_command_ends_with_the_code_of_what_is_wrong(folder, tmp_path, capsys):
    run = str(tmp_path / "run")

    def code(*words) -> int:
        found = main(["import", str(folder), *words])
        assert capsys.readouterr().err.count("\n") == (found != 0)
        return found

    assert code() == 4  # no --out
    assert code("--out", run, "--set", "model.layers=2") == 6
    (folder / "tokenizer.json").write_text("{}")
    assert code("--out", run) == 5
    (folder / "tokenizer.json").unlink()
    rewrite(folder, model_type="mamba")
    assert code("--out", run) == 4
    shutil.rmtree(folder)
    assert code("--out", run) == 4
    assert not Path(run).exists()


def files_in(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_published_model_is_never_taken_for_a_run_nor_a_run_for_one(folder, tmp_path, capsys):
    """Nor is anything written into its folder, whose config.json a run would replace."""
    before = files_in(folder)
    text = "[model]\nlayers = 1\nembed = 16\nheads = 1\n[data]\ncorpus = 'synthetic'\n"
    (tmp_path / "c.toml").write_text(f"{text}[train]\nsteps = 1\n[mesh]\ndata = -1\n")
    config, model = str(tmp_path / "c.toml"), str(folder)
    damaged = "is a published model, which a run would damage; try another --"
    for typed, code, said in (
        (["import", model, "--out", model], 10, f"{damaged}out"),
        (["train", config, "--run", model], 10, f"{damaged}run"),
        (["train", config, "--run", model, "--fresh"], 10, f"{damaged}run"),
        (["sample", model], 6, f"of a published model; try spmdtrain import {model} --out RUN"),
        (["export", model, str(tmp_path / "out"), "--to", "hf"], 6, "of a published model; try"),
        (["import", str(described_run()), "--out", "r"], 4, "is a run already, and no published"),
    ):
        assert main(typed) == code, typed
        assert said in capsys.readouterr().err
        assert files_in(folder) == before


def test_an_import_without_a_tokenizer_says_so(folder):
    alone = f"{folder} holds no tokenizer.json: the run has no tokenizer, and reads ids alone"
    assert described(*model_config(folder)).remarks == (alone,)
    (folder / "tokenizer.model").touch()
    (line,) = described(*model_config(folder)).remarks
    assert line.startswith(f"{alone}; found tokenizer.model; try the tokenizer.json of the same")
