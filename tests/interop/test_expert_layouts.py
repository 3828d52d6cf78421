"""Experts lie in files in three layouts: one model in each of them is one model, and goes out as it
came in. Layouts are told by names: in these sizes E = 2 F, so no shape tells them.
"""

import re
from pathlib import Path

import directories
import ml_dtypes
import numpy as np
import pytest

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop.imported_tensors import LIST, imported_tensors, list_tensors
from spmdtrain.interop.published_weights import Weights
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.interop.target import Target
from spmdtrain.models.abstract import build_model
from spmdtrain.running.published.as_run import model_config
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

FAMILIES = ("qwen3_moe", "glm4_moe", "hy_v3", "exaone_moe", "solar_open", "minimax_m2")
CONFIGS = {
    name: directories.CONFIGS[name] for name in (*FAMILIES, "deepseek_v3", "lfm2_moe", "qwen3_next")
}
CONFIGS["glm4_moe"] = CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 1}
CONFIGS["mixtral"] = directories.CONFIGS["mixtral"] | {"intermediate_size": 24}
CONFIGS["olmoe"] = directories.CONFIGS["olmoe"] | {"intermediate_size": 48}
# What transformers 5 calls the tensors of a layer in memory, and saves where asked to.
IN_MEMORY = (
    (r"block_sparse_moe", "mlp"),
    (r"mlp\.router\.gate\.weight", "mlp.gate.weight"),
    (r"mlp\.expert_bias", "mlp.e_score_correction_bias"),
    (r"mlp\.shared_mlp", "mlp.shared_experts"),
)
MATRIX = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
OLDER = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NEWER = {older: newer for newer, older in OLDER.items()}


def in_memory(name: str, family: str) -> str:
    for pattern, instead in IN_MEMORY:
        name = re.sub(pattern, instead, name)
    if family == "exaone_moe":
        name = name.replace("mlp.e_score", "mlp.gate.e_score")
    return name


def stacked(tensors: dict[str, np.ndarray], family: str) -> dict[str, np.ndarray]:
    """Two tensors for the experts of a layer: rows of gates, then those of values."""
    found, experts = {}, {}
    for name, x in tensors.items():
        if matrix := MATRIX.fullmatch(name):
            place, number, which = matrix.groups()
            which = NEWER.get(which, which)
            experts.setdefault(in_memory(place, family), {})[which, int(number)] = x
        else:
            found[in_memory(name, family)] = x
    for place, of_layer in experts.items():
        numbers = range(1 + max(number for _, number in of_layer))
        found[f"{place}.experts.gate_up_proj"] = np.stack(
            [np.concatenate([of_layer["gate_proj", x], of_layer["up_proj", x]]) for x in numbers]
        )
        found[f"{place}.experts.down_proj"] = np.stack([of_layer["down_proj", x] for x in numbers])
    return found


def renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The other names of the matrices of each expert."""
    found = {}
    for name, x in tensors.items():
        matrix = MATRIX.fullmatch(name)
        names = OLDER if matrix and matrix[3] in OLDER else NEWER
        name = in_memory(name, "") if names is NEWER else name
        found[name.replace(matrix[3], names[matrix[3]]) if matrix else name] = x
    return found


def opened(folder: Path) -> tuple[Weights, Target, dict[str, tuple]]:
    """The weights of a folder, the target of its export, and the shapes of our parameters."""
    published, config = model_config(folder)
    model = build_model(config)
    shapes = {path: tuple(x.shape) for path, x in model.parameters.items()}
    of_layer = {path: x[1:] if model.in_stack(path) else x for path, x in shapes.items()}
    (folder / LIST).write_text(list_tensors(open_tensors(folder)))
    imported = imported_tensors(folder)
    target = Target(config.model, published.family, {}, "float32", config.finetune, imported)
    return Weights(published, config.model, of_layer), target, shapes


def parameters_and_tensors(folder: Path) -> tuple[dict, dict]:
    """Our parameters of a folder, by (path, layer), and the tensors that they are exported as."""
    weights, target, shapes = opened(folder)
    parameters, tensors = {}, {}
    for path, shape in shapes.items():
        entry, mapped, layers = target.mapped(path, shape)
        for layer in layers:
            x = weights.read(path, layer, tuple(slice(0, size) for size in mapped.shape))
            parameters[path, layer] = x
            directories.put(tensors, entry.of_layer(layer), mapped.write(x))
    return parameters, tensors


@pytest.mark.parametrize("family", CONFIGS)
def test_three_layouts_of_one_model_are_one_model_and_go_out_as_they_came(family, tmp_path):
    """With the layer of a further token, where a family has one."""
    each = directories.drawn(directories.tensors_of(CONFIGS[family]))
    layouts = {"each": each, "stacked": stacked(each, family), "renamed": renamed(each)}
    wanted = None
    for name, tensors in layouts.items():
        directories.write(tmp_path / name, CONFIGS[family], tensors)
        parameters, exported = parameters_and_tensors(tmp_path / name)
        wanted = parameters if wanted is None else wanted
        assert parameters.keys() == wanted.keys()
        assert all(np.array_equal(x, wanted[at]) for at, x in parameters.items()), name
        assert exported.keys() == tensors.keys()
        assert all(np.array_equal(x, exported[at]) for at, x in tensors.items()), name


def test_experts_of_two_layouts_in_one_folder_are_refused(tmp_path):
    """Or those that are read would depend on the order in which names are looked for."""
    each = directories.drawn(directories.tensors_of(CONFIGS["qwen3_moe"]))
    directories.write(tmp_path, CONFIGS["qwen3_moe"], stacked(each, "qwen3_moe") | each)
    with pytest.raises(CheckpointError, match=r"holds .*experts.* which nothing reads"):
        opened(tmp_path)


def test_a_stacked_tensor_that_is_missing_is_named(tmp_path):
    tensors = stacked(directories.drawn(directories.tensors_of(CONFIGS["olmoe"])), "olmoe")
    del tensors["model.layers.0.mlp.experts.down_proj"]
    directories.write(tmp_path, CONFIGS["olmoe"], tensors)
    with pytest.raises(CheckpointError, match=r"lacks model.layers.0.mlp.experts.down_proj;"):
        opened(tmp_path)


WIDE = ("mlp.gate.weight", "e_score_correction_bias", "expert_bias")


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_was_wide_in_narrow_files_stays_wide_and_files_stay_apart(dtype, tmp_path):
    """A bias of 7 and a little: in 16 bits all experts would have the same one."""
    config = CONFIGS["glm4_moe"] | {"dtype": "bfloat16"}
    tensors = directories.drawn(directories.tensors_of(config), ml_dtypes.bfloat16)
    for name, x in tensors.items():
        if name.endswith(WIDE):
            tensors[name] = x.astype(np.float32) * 1.001 + (7 if "bias" in name else 0)
    directories.write(tmp_path / "model", config, tensors, parts=3)
    import_model(tmp_path / "model", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", dtype=dtype)
    before, after = open_tensors(tmp_path / "model"), open_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.path.name) == (after[name].dtype, after[name].path.name), name
        assert np.array_equal(tensor.map(), after[name].map()), name


@pytest.mark.seconds
def test_a_bias_that_chooses_is_never_rounded(tmp_path):
    """Nor where all that was imported is in float32, and the export is asked to be in 16 bits."""
    config = CONFIGS["minimax_m2"]
    tensors = directories.drawn(directories.tensors_of(config))
    biases = {name: 7 + x for name, x in tensors.items() if name.endswith(WIDE)}
    directories.write(tmp_path / "model", config, tensors | biases)
    import_model(tmp_path / "model", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    after = open_tensors(tmp_path / "out")
    assert {str(tensor.dtype) for tensor in after.values()} == {"bfloat16", "float32"}
    assert all(np.array_equal(after[name].map(), x) for name, x in biases.items())
    again = import_model(tmp_path / "out", tmp_path / "again")
    held = np.concatenate(again.params["blocks.layer.mlp.router.load_bias_x"])
    assert np.array_equal(held, np.concatenate([biases[name] for name in sorted(biases)]))
