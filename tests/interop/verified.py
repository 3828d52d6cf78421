"""Measures each family against transformers on several layouts, and writes the table of the docs.

    PYTHONPATH=. python tests/interop/verified.py [FAMILY ...] [--write]

Needs torch and transformers. Tiny models whose every parameter is random: see directories.py.
Without optimisation XLA fuses no multiplication with a sum, and the gradients of many gelus in a
row ("gemma4_text with shared keys") are off by 1e-5 of float64 instead of 3e-6: those are measured
with XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Tiny programs need no speed: they compile in a quarter of the time, as in tests/conftest.py.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["HF_HUB_OFFLINE"] = "1"

import directories
import gemma4_files
import jax
import numpy as np
import torch
import transformers

from spmdtrain.cli.published.check import class_in_transformers
from spmdtrain.config.errors import UserError
from spmdtrain.config.published.read_config import read_published
from spmdtrain.data.source import open_data
from spmdtrain.inference.sample import make_logits
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.interop.target import Target
from spmdtrain.running.device_batches import batches
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model
from spmdtrain.train.gradients.differentiable import make_gradients

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- verified: begin -->", "<!-- verified: end -->"
ONE = "one device"
LAYOUTS = {
    ONE: (),
    "data 2 x fsdp 2 x tensor 2": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "pipeline 2 x tensor 2": ("mesh.pipeline=2", "mesh.tensor=2", "train.microbatch=1"),
}
# The tests' models have 3 heads, which tensor 2 does not divide.
DIVISIBLE = {
    name: {"num_attention_heads": 4, "num_key_value_heads": 4}
    for name in ("deepseek_v3", "glm4_moe_lite", "mistral4", "deepseek_v32", "glm_moe_dsa", "youtu")
}
# Stages share out whole rounds of layers, which the tests' models do not have.
DIVISIBLE |= {
    "kimi_linear": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "linear_attn_config": directories.CONFIGS["kimi_linear"]["linear_attn_config"]
        | {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4]},
    },
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", directories.FULL] * 2,
    },
    "nemotron_h": {"num_hidden_layers": 8, "hybrid_override_pattern": "ME*-ME*-"},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", directories.FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", *["conv", directories.FULL] * 2]},
    "cohere2": {"num_hidden_layers": 4, "layer_switch": 2, "sliding_window_pattern": 2},
    "flex_olmo": {"num_experts": 8},
    "qwen3_5_moe_text": {"num_hidden_layers": 4, "full_attention_interval": 2},
    "qwen3_next": {"num_hidden_layers": 4, "full_attention_interval": 2},
    "gemma4_unified_text": {
        "num_hidden_layers": 4,
        "layer_types": [directories.WINDOW, directories.FULL] * 2,
    },
    **dict.fromkeys(
        ("gemma4_text", "gemma4_text with experts"),
        {
            "num_hidden_layers": 6,
            "layer_types": [directories.WINDOW, directories.WINDOW, directories.FULL] * 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 4,
        },
    ),
}
MESH, PIPELINE = list(LAYOUTS)[1:]
HEAD = (
    f"| family | tensors read | logits, {ONE} | {MESH} | worst gradient, {ONE} | {MESH} "
    f"| {PIPELINE} | export, each layout |",
    "|---|---|---|---|---|---|---|---|",
)
SEQUENCES, LENGTH = 4, 39
FAMILIES = [*directories.CONFIGS, *gemma4_files.KINDS]


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a family, or of one of its kinds, in sizes that meshes divide."""
    return (directories.CONFIGS | directories.VARIANTS)[name] | DIVISIBLE.get(name, {})


def shown(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def in_layers(setup, path: str, gradient: jax.Array) -> np.ndarray:
    """Returns a parameter's gradient without padding, its layers in order."""
    whole = np.asarray(jax.device_get(gradient))
    cut = whole[tuple(slice(size) for size in setup.padding.of_model[path])]
    return np.asarray(setup.model.stage_layout.unstaged(cut)) if setup.model.in_stack(path) else cut


def measure(name: str, folder: Path) -> list[str]:
    """Returns the cells of a family's row."""
    config = config_of(name)
    written = directories.write(folder / "model", config)
    model = (
        class_in_transformers(folder / "model")
        .from_pretrained(folder / "model", local_files_only=True, attn_implementation="eager")
        .eval()
    )
    directories.learn_all_tokens(model)
    tokens = np.random.default_rng(1).integers(0, directories.VOCAB, (SEQUENCES, LENGTH + 1))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.double().numpy()
    model = model.double() if name in directories.IN_DOUBLE else model
    model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss.backward()
    found_logits, found_gradients = [], []
    for layout, mesh in LAYOUTS.items():
        run = folder / layout.replace(" ", "")
        size = (f"train.sequence_length={LENGTH}", f"train.global_batch={SEQUENCES}")
        try:
            imported = import_model(folder / "model", run, overrides=(*size, *mesh))
        except UserError as error:
            print(error)
            found_gradients.append(None)
            continue
        setup = imported.setup
        if "pipeline" not in layout:
            ours = np.asarray(make_logits(setup)(imported.params, tokens), np.float64)
            found_logits.append(directories.apart(ours[..., : logits.shape[-1]], logits))
        _, data = open_data(setup.config, lambda seed, index: tokens[index % SEQUENCES])  # noqa: ARG005
        with batches(setup, data, 0, 0) as ahead:
            gradients = make_gradients(setup)(imported.params, next(ahead))
        published = read_published(folder / "model")
        finetune = setup.config.finetune
        target = Target(setup.config.model, published.family, {}, "float32", finetune)
        ours = {}
        for path, value in gradients.items():
            whole = in_layers(setup, path, value)
            entry, mapped, layers = target.mapped(path, whole.shape)
            for layer in layers:
                one = whole if layer is None else whole[layer]
                directories.put(ours, entry.of_layer(layer), mapped.write(one))
        worst = max(
            directories.apart(ours[tensor], gradient)
            for tensor, gradient in directories.gradients_in_torch(model).items()
        )
        found_gradients.append(worst)
        export_run(run, folder / "out" / layout.replace(" ", ""))
        for tensor, stored in open_tensors(folder / "out" / layout.replace(" ", "")).items():
            assert np.array_equal(stored.map(), written[tensor]), (layout, tensor)
    exported = folder / "out" / ONE.replace(" ", "")
    _, loading = class_in_transformers(exported).from_pretrained(
        exported, output_loading_info=True, local_files_only=True
    )
    assert not any(loading.values()), loading
    errors = (*found_logits, *found_gradients)
    cells = ["refused" if error is None else shown(error) for error in errors]
    return [name, f"{len(written)} of {len(written)}", *cells, "bit-equal, loads"]


def main(asked: list[str]) -> None:
    write = "--write" in asked
    names = [name for name in asked if name != "--write"] or FAMILIES
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(f"| {' | '.join(measure(name, Path(folder)))} |")
        print(rows[-1], flush=True)
    if write:
        write_table(BEGIN, END, HEAD, rows)


def write_table(begin: str, end: str, head: Sequence[str], rows: Sequence[str]) -> None:
    """Writes the rows of a table between two marks of the page, under the versions used.

    Rows of other families stay if they have the same columns and were measured with the same
    versions.
    """
    torch_version = torch.__version__.partition("+")[0]
    versions = f"torch {torch_version}, transformers {transformers.__version__}"
    head = [f"With {versions} and jax {jax.__version__}:", "", *head]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    table, _, after = rest.partition(end)
    former = table.strip().splitlines()
    kept = former[len(head) :] if former[: len(head)] == head else []
    by_family = {row.split(" | ")[0]: row for row in (*kept, *rows)}
    order = [f"| {family}" for family in FAMILIES]
    in_order = sorted(by_family, key=lambda family: order.index(family))
    lines = "\n".join([*head, *(by_family[family] for family in in_order)])
    PAGE.write_text(f"{before}{begin}\n{lines}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
