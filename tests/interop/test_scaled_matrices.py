"""Matrices of 8- and 4-bit floats, as ModelOpt, compressed-tensors and transformers write them."""

import re

import directories
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.published.quantisation import OF_MODELOPT
from spmdtrain.config.published.read_config import read_published
from spmdtrain.interop.mxfp4 import NUMBERS
from spmdtrain.interop.safetensors_files import DTYPES, open_tensors
from spmdtrain.interop.scaled_matrices import KINDS, with_scales
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

WHOLE = np.float32(0.25)
FLOAT8 = ml_dtypes.float8_e4m3fn
FLOATS_4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
FLOATS_8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {"targets": ["re:.*mlp.*"], "weights": FLOATS_4},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": FLOATS_8},
    },
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def drawn(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(Codes of e2m1 floats [O, I], a power of two for 16 of a row.)"""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (rows, columns))
    return codes, random.choice([0.5, 1, 2], (rows, columns // 16)).astype(np.float32)


def in_float32(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return NUMBERS[codes] * np.repeat(scales, 16, 1) * WHOLE


def by_modelopt(name: str, codes: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
    return {
        f"{name}.weight": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        f"{name}.weight_scale": scales.astype(FLOAT8),
        f"{name}.weight_scale_2": np.array(WHOLE),
        f"{name}.input_scale": np.array(1.0, np.float32),
    }


def by_compressed_tensors(name: str, codes: np.ndarray, scales: np.ndarray) -> dict:
    """The same under other names; the scale of the matrix is the reciprocal."""
    ours = by_modelopt(name, codes, scales)
    return {
        f"{name}.weight_packed": ours[f"{name}.weight"],
        f"{name}.weight_scale": ours[f"{name}.weight_scale"],
        f"{name}.weight_global_scale": 1 / WHOLE[None],
        f"{name}.input_global_scale": np.ones(1, np.float32),
    }


def in_8_bits(scale: np.ndarray):
    """The way to write a matrix in e4m3 floats with this scale for all, or for each row."""

    def write(name: str, codes: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
        matrix = in_float32(codes, scales) / scale.astype(np.float32)
        return {f"{name}.weight": matrix.astype(FLOAT8), f"{name}.weight_scale": scale}

    return write


ROWS = 2.0 ** np.arange(-2, 3)[:, None]
FORMATS = {
    "NVFP4 of ModelOpt": by_modelopt,
    "NVFP4 of compressed-tensors": by_compressed_tensors,
    "e4m3, one scale": in_8_bits(np.array(0.5, np.float32)),
    "e4m3, a scale for each row": in_8_bits(ROWS.astype(ml_dtypes.bfloat16)),
}


@pytest.mark.parametrize("form", FORMATS)
def test_one_matrix_is_the_same_in_each_format(form, tmp_path):
    codes, scales = drawn(5, 32)
    stored = FORMATS[form]("a", codes, scales)
    save_file(stored, tmp_path / "model.safetensors")
    tensors = with_scales(open_tensors(tmp_path, DTYPES | KINDS))
    assert list(tensors) == ["a.weight"]
    assert np.array_equal(tensors["a.weight"].map(), in_float32(codes, scales))


@pytest.mark.seconds
@pytest.mark.parametrize("by", ["compressed-tensors", "modelopt"])
def test_a_model_of_4_and_8_bits_comes_in(by, tmp_path):
    """Experts in 4 bits, attention in 8, the rest whole; the export is whole."""
    config = directories.CONFIGS["qwen3_moe"] | {"hidden_size": 32, "moe_intermediate_size": 16}
    wanted = directories.drawn(directories.tensors_of(config))
    packed = {}
    for seed, (name, x) in enumerate(wanted.items()):
        base = name.removesuffix(".weight")
        if x.ndim != 2 or not re.search(r"experts.*proj|self_attn.*proj|lm_head", name):
            packed[name] = x
            continue
        codes, scales = drawn(*x.shape, seed)
        wanted[name] = in_float32(codes, scales)
        four = by_modelopt if by == "modelopt" else by_compressed_tensors
        one = in_8_bits(np.array([0.5], np.float32))
        packed |= (one if "self_attn" in name else four)(base, codes, scales)
    method = MODELOPT if by == "modelopt" else MIXED
    directories.write(tmp_path / "packed", config | {"quantization_config": method}, packed)
    import_model(tmp_path / "packed", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", dtype="float32")
    after = open_tensors(tmp_path / "out")
    assert after.keys() == wanted.keys()
    assert all(np.array_equal(after[name].map(), x) for name, x in wanted.items())
    # Scales are float32 and the most tensors; norms that were wide among narrow ones stay so.
    export_run(tmp_path / "run", tmp_path / "narrow", dtype="bfloat16")
    kinds = {name: tensor.kind for name, tensor in open_tensors(tmp_path / "narrow").items()}
    assert kinds["model.norm.weight"] == np.float32
    assert kinds["lm_head.weight"] == ml_dtypes.bfloat16


@pytest.mark.parametrize("form", FORMATS)
def test_a_matrix_without_its_scales_is_named(form, tmp_path):
    """Each of them missing, and of another shape."""
    stored = FORMATS[form]("a", *drawn(5, 32))
    matrix = next(iter(stored))
    for name in stored:
        if name == matrix or "input" in name:
            continue
        for other in ({}, {name: np.ones((3, 7), stored[name].dtype)}):
            left = {key: x for key, x in stored.items() if key != name} | other
            save_file(left, tmp_path / "model.safetensors")
            with pytest.raises(
                CheckpointError, match=rf"{matrix} of .* and no scales; asked {name}"
            ):
                with_scales(open_tensors(tmp_path, DTYPES | KINDS))


@pytest.mark.parametrize(
    ("quantised", "said"),
    {
        "integers": (
            {"weights": FLOATS_4 | {"type": "int", "group_size": 128}},
            r"\(compressed-tensors, int, 4 bits\)",
        ),
        "MXFP8": (
            {"weights": FLOATS_8 | {"group_size": 32}},
            r"\(compressed-tensors, float, 8 bits\)",
        ),
        "a zero point": (
            {"weights": FLOATS_4 | {"symmetric": False}},
            r"\(compressed-tensors, float, 4 bits\)",
        ),
        "scales of the input": (
            {"weights": FLOATS_4, "pre_quant_scale": True},
            r"\(compressed-tensors, float, 4 bits\)",
        ),
        "nothing": ({}, r"\(compressed-tensors\)"),
    }.values(),
)
def test_other_numbers_are_refused(quantised, said, tmp_path):
    method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": quantised}}
    config = directories.CONFIGS["qwen3"] | {"quantization_config": method}
    directories.write(tmp_path, config)
    with pytest.raises(CheckpointError, match=f"{said}: its weights cannot be trained"):
        read_published(tmp_path)


def test_the_older_key_of_compressed_tensors_is_refused(tmp_path):
    older = {"compression_config": MIXED}
    directories.write(tmp_path, directories.CONFIGS["qwen3"] | older)
    with pytest.raises(CheckpointError, match=r"quantised \(compressed-tensors\)"):
        read_published(tmp_path)


def test_the_file_of_modelopt_alone_says_it_as_well(tmp_path):
    """Older versions wrote nothing into config.json."""
    directories.write(tmp_path, directories.CONFIGS["qwen3"])
    assert not read_published(tmp_path).packing
    (tmp_path / OF_MODELOPT).write_text("{}")
    assert read_published(tmp_path).packing == "scaled"
