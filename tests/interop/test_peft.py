"""Adapters as files of peft: what the files say by peft's formula, and what comes back."""

import json
import re
import resource

import jax
import numpy as np
import pytest
from directories import put
from helpers import tiny
from safetensors.numpy import save_file

import spmdtrain as st
from spmdtrain.config.schema.finetune import LINEAR
from spmdtrain.interop.names.model_sizes import sizes_of
from spmdtrain.interop.names.model_table import table_of
from spmdtrain.interop.peft.adapter_config import CONFIG, OF_MAMBA
from spmdtrain.interop.peft.adapter_files import WEIGHTS, read_adapters, write_adapters
from spmdtrain.interop.safetensors_files import open_file
from spmdtrain.models.adapters.by_path import merged
from spmdtrain.running.published.export_adapters import type_of_base

OF_DELTA = ("key_heads=2", "value_heads=6", "key_dim=8", "value_dim=6", "taps=3")
OF_KIMI = ("key_heads=3", "value_heads=3", "key_dim=8", "value_dim=8", "taps=3", "decay=channel")
OF_KIMI += ("decay_rank=4", "gate_rank=4", "gate=sigmoid")
MIXED = (
    *("model.name=llama", "model.kv_heads=2", "model.ffn=24", "model.output_gate=channel"),
    *(f"model.delta.{size}" for size in OF_DELTA),
)
STATES = ("model.ssd.heads=4", "model.ssd.head_dim=3", "model.ssd.groups=2", "model.ssd.state=5")
FAMILIES = {
    "gpt2": ("model.name=gpt",),
    "llama": ("model.name=llama", "model.kv_heads=2", "model.ffn=24"),
    "ernie4_5": ("model.name=llama", "model.kv_heads=2", "model.ffn=24", "model.mlp_bias=true"),
    "phi3": ("model.name=llama", "model.kv_heads=2", "model.ffn=24"),
    "qwen3_5_text": (*MIXED, "model.mixers=['delta', 'delta', 'attention']", "model.layers=4"),
    "qwen3_next": (*MIXED, "model.mixers=['delta', 'attention']", "model.layers=4"),
    "kimi_linear": (
        *("model.name=llama", "model.ffn=24", "model.mixers=['delta']", "model.layers=2"),
        *(f"model.delta.{size}" for size in OF_KIMI),
    ),
    "olmo_hybrid": (*MIXED, "model.mixers=['delta', 'attention']", "model.output_gate=none"),
    "nemotron_h": (
        *("model.name=llama", "model.kv_heads=2", "model.ffn=24", "model.mlp=relu2", *STATES),
        *("model.layers=4", "model.mixers=['ssd', 'none', 'attention', 'none']"),
        "model.mlps=['none', 'mlp']",
    ),
    "falcon_h1": (
        *("model.name=llama", "model.kv_heads=2", "model.ffn=24", "model.mixers=['both']"),
        *STATES,
    ),
    "granitemoehybrid": (
        *("model.name=llama", "model.kv_heads=2", "model.ffn=24", *STATES),
        "model.mixers=['ssd', 'attention']",
    ),
    "glm4_moe": (
        *("model.name=llama", "model.kv_heads=2", "model.ffn=24"),
        *(
            "model.experts.count=4",
            "model.experts.chosen=2",
            "model.experts.ffn=8",
            "model.experts.shared=1",
        ),
        *("model.experts.first_dense=1", "model.layers=3"),
    ),
}
SIZES = ("model.layers=2", "model.embed=16", "model.heads=4", "model.vocab=32", "finetune.rank=3")


def drawn(*settings: str):
    """(config, values): random numbers for all parameters of a model with adapters."""
    config = tiny(*SIZES, *settings)
    random = np.random.default_rng(0)
    shapes = st.shard(config, devices=jax.devices()[:1]).state.params
    draw = random.standard_normal
    return config, {path: draw(x.shape, np.float32) for path, x in shapes.items()}


def published(values, config, family: str) -> dict[str, np.ndarray]:
    """The tensors of the published model, by name."""
    found = {}
    for path, x in values.items():
        entry = table_of(family, config.model).get(path)
        stacked = path.startswith("blocks.layer.")
        if entry is not None:
            for layer, one in enumerate(x) if stacked else [(None, x)]:
                written = entry.rule(sizes_of(config.model), one.shape).write(one)
                put(found, entry.of_layer(layer), written)
    return found


def by_the_formula(folder, base: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """W + s B A, or m (W + s B A) / |W + s B A|, of the files alone, as peft has it."""
    said = json.loads((folder / CONFIG).read_text())
    tensors = {name: each.map() for name, each in open_file(folder / WEIGHTS).items()}
    found = dict(base)
    for name in tensors:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if not name.endswith(".lora_A.weight"):
            continue
        parameters = said["target_parameters"] or ()
        endings = [*said["target_modules"], *(x.removesuffix(".weight") for x in parameters)]
        (target,) = (ending for ending in endings if f".{module}".endswith(f".{ending}"))
        rank = said["rank_pattern"].get(target, said["r"])
        alpha = said["alpha_pattern"].get(target, said["lora_alpha"])
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        assert a.shape[0] == rank
        scale = alpha / (rank**0.5 if said["use_rslora"] else rank)
        w = base[f"{module}.weight"]
        flip = said["fan_in_fan_out"]
        w = (w.T if flip else w) + scale * (b @ a)
        if said["use_dora"]:
            m = tensors[name.replace("lora_A.weight", "lora_magnitude_vector")]
            w = w * (m / np.linalg.norm(w, axis=1))[:, None]
        found[f"{module}.weight"] = w.T if flip else w
    for name in said["modules_to_save"] or ():
        found[f"{name}.weight"] = tensors[f"base_model.model.{name}.weight"]
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        ("finetune.kind=lora", "finetune.also_train=tokens.*"),
        ("finetune.kind=dora", "model.output_gate=channel"),
        ("finetune.kind=dora", "finetune.rank_stabilised=true", "finetune.targets=q,v,down"),
    ],
)
def test_the_files_say_what_merging_does(family, settings, tmp_path):
    config, values = drawn(*FAMILIES[family], *settings)
    if config.model.experts and config.finetune.kind == "dora":
        with pytest.raises(st.UserError, match="no DoRA for .* in a model with experts"):
            write_adapters(tmp_path / "out", values, config, family, "base")
        return
    if family in OF_MAMBA and "out" in config.finetune.targets:
        with pytest.raises(st.UserError, match=f"peft refuses .*out_proj in models of {family}"):
            write_adapters(tmp_path / "out", values, config, family, "base")
        others = ",".join(name for name in LINEAR if name != "out")
        config, values = drawn(*FAMILIES[family], *settings, f"finetune.targets={others}")
    write_adapters(tmp_path / "out", values, config, family, "base")
    got = by_the_formula(tmp_path / "out", published(values, config, family))
    want = published(merged(values, config.finetune, config.model), config, family)
    if config.model.tied and config.finetune.also_train:
        # peft replaces the head, too, which would stay as it was.
        assert np.array_equal(got.pop("lm_head.weight"), values["tokens.table_ve"])
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert np.allclose(got[name], x, rtol=1e-5, atol=1e-5), name


def test_beside_a_tower_names_are_those_of_the_text_part_alone(tmp_path):
    settings = ("finetune.kind=lora", "finetune.also_train=tokens.*")
    config, values = drawn(*FAMILIES["llama"], *settings)
    for name in ("plain", "beside"):
        write_adapters(tmp_path / name, values, config, "llama", has_tower=name == "beside")
    plain, beside = (open_file(tmp_path / name / WEIGHTS) for name in ("plain", "beside"))
    moved = {name.replace(".model.model.", ".model.model.language_model.") for name in plain}
    assert set(beside) == moved
    said = json.loads((tmp_path / "beside" / CONFIG).read_text())
    modules = {name[len("base_model.model.") :].rpartition(".lora_")[0] for name in beside}
    for module in filter(None, modules):
        assert re.fullmatch(said["target_modules"], module)
        in_tower = module.replace("language_model.", "vision_tower.encoder.")
        assert not re.fullmatch(said["target_modules"], in_tower)
    assert said["modules_to_save"] == ["model.language_model.embed_tokens"]


def test_a_disk_that_is_full_costs_one_line_and_leaves_nothing(tmp_path):
    config, values = drawn(*FAMILIES["llama"], "finetune.kind=lora")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(st.UserError, match="cannot write .*too large; try another folder") as e:
            write_adapters(tmp_path / "out", values, config, "llama")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert e.value.exit_code == 10
    assert not list(tmp_path.iterdir())


def test_a_base_on_this_machine_says_whether_it_has_a_tower(tmp_path):
    run, base = tmp_path / "run", tmp_path / "base"
    for folder, kind in ((run / "hf", "gemma4"), (base, "gemma4_text")):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    assert type_of_base(run, str(base)) == "gemma4_text"
    assert type_of_base(run, "someone/elsewhere") == type_of_base(run, None) == "gemma4"
    assert type_of_base(base, "someone/elsewhere") is None


@pytest.mark.parametrize(
    ("family", "kind", "modules", "adapters"),
    [
        ("llama", "lora", 2 * 7, 7),
        ("llama", "dora", 2 * 7, 7),
        ("ernie4_5", "dora", 2 * 7, 7),
        ("phi3", "lora", 2 * 4, 7),
        ("qwen3_5_text", "dora", 3 * (5 + 3) + 7, (6 + 1 + 3) + (4 + 3) + (6 + 1 + 3)),
        ("qwen3_next", "lora", 2 * (3 + 3) + 2 * 7, 3 + 7 + 7),
        ("glm4_moe", "lora", 7 + 2 * 7, 7 + 7),
    ],
)
def test_what_is_written_is_read_back_to_the_bit(family, kind, modules, adapters, tmp_path):
    also = "finetune.also_train=norm.*,*mlp_norm.*"
    config, values = drawn(*FAMILIES[family], f"finetune.kind={kind}", also)
    whole = [path for path in values if path == "norm.scale_e" or "mlp_norm" in path]
    tensors = write_adapters(tmp_path / "out", values, config, family)
    assert tensors == modules * (3 if kind == "dora" else 2) + 1 + config.model.layers
    found = read_adapters(tmp_path / "out", values, config, family)
    assert len(found) == adapters * (3 if kind == "dora" else 2) + len(whole)
    for path, x in found.items():
        assert np.array_equal(x, values[path]), path


def test_a_tied_head_is_written_beside_its_table_and_read_back(tmp_path):
    settings = ("model.tied=true", "finetune.kind=lora", "finetune.also_train=tokens.*")
    config, values = drawn(*FAMILIES["llama"], *settings)
    write_adapters(tmp_path / "out", values, config, "llama")
    found = read_adapters(tmp_path / "out", values, config, "llama")
    assert np.array_equal(found["tokens.table_ve"], values["tokens.table_ve"])

    tensors = {name: x.map() for name, x in open_file(tmp_path / "out" / WEIGHTS).items()}
    head = "base_model.model.lm_head.weight"
    save_file(tensors | {head: 2 * tensors[head]}, tmp_path / "out" / WEIGHTS)
    with pytest.raises(st.UserError, match="head apart from the table.*--set model.tied=false"):
        read_adapters(tmp_path / "out", values, config, "llama")


def test_an_adapter_of_a_fused_layer_is_one_of_each_part(tmp_path):
    """A file of c_attn, as peft makes it: one A, which queries, keys and values share."""
    config, values = drawn(*FAMILIES["gpt2"], "finetune.kind=lora", "finetune.targets=q,k,v")
    shared = values | {
        f"blocks.layer.attention.qkv_eknd.{part}.a": values["blocks.layer.attention.qkv_eknd.q.a"]
        for part in "kv"
    }
    write_adapters(tmp_path / "out", shared, config, "gpt2")
    tensors = {name: x.map() for name, x in open_file(tmp_path / "out" / WEIGHTS).items()}
    folded = {
        name: x[:3].copy() if "lora_A" in name else np.sum(np.split(x, 3, 1), 0)
        for name, x in tensors.items()
    }
    save_file(folded, tmp_path / "out" / WEIGHTS)
    said = json.loads((tmp_path / "out" / CONFIG).read_text())
    said |= {"rank_pattern": {}, "alpha_pattern": {}}
    (tmp_path / "out" / CONFIG).write_text(json.dumps(said))
    found = read_adapters(tmp_path / "out", values, config, "gpt2")
    assert {path for path in found if not np.array_equal(found[path], shared[path])} == set()


def test_what_is_not_the_adapter_that_is_asked_for_costs_one_line(tmp_path):
    config, values = drawn(*FAMILIES["llama"], "finetune.kind=lora")
    write_adapters(tmp_path / "out", values, config, "llama")

    def read(*settings: str):
        config, values = drawn(*FAMILIES["llama"], "finetune.kind=lora", *settings)
        return read_adapters(tmp_path / "out", values, config, "llama")

    with pytest.raises(st.UserError, match=r"r=3; asked 2; try --set finetune.rank=3"):
        read("finetune.rank=2")
    with pytest.raises(st.UserError, match=r"lora_alpha=32.0; asked 1.0"):
        read("finetune.alpha=1.0")
    with pytest.raises(st.UserError, match=r"down_proj.lora_A.weight, which nothing reads, and 3"):
        read("finetune.targets=q,k,v,out,gate,up")
    with pytest.raises(st.UserError, match=r"has another shape; asked .*q.a \[2, 8, 3\]"):
        read_adapters(
            tmp_path / "out",
            {
                **values,
                "blocks.layer.attention.qkv_eknd.q.a": values[
                    "blocks.layer.attention.qkv_eknd.q.a"
                ][:, :8],
            },
            config,
            "llama",
        )
    with pytest.raises(st.UserError, match="not empty"):
        write_adapters(tmp_path / "out", values, config, "llama")
    (tmp_path / "out" / CONFIG).write_text("[")
    with pytest.raises(st.UserError, match="adapter_config.json is damaged"):
        read()
    with pytest.raises(st.UserError, match="is not a peft adapter"):
        read_adapters(tmp_path, values, config, "llama")
    with pytest.raises(st.UserError, match="has no adapters; found finetune.kind='full'"):
        write_adapters(tmp_path / "full", {}, tiny(), "llama")
