"""DeepSeek-V3's files: pairs of channels that turn, a layer of a further token, and 8 bits."""

import json
import re

import directories
import ml_dtypes
import numpy as np
import pytest

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop import latent_attention
from spmdtrain.interop.pieces import Sizes
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

CONFIG = directories.CONFIGS["deepseek_v3"]
FURTHER = CONFIG | {"num_nextn_predict_layers": 2, "q_lora_rank": None, "n_shared_experts": 1}
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def test_scores_of_channels_that_lie_in_pairs_are_those_of_halves():
    """By the files' own formula: a pair is a complex number, and turns with its position."""
    random = np.random.default_rng(0)
    embed, heads, plain, turned, rank = 9, 2, 5, 6, 4
    sizes = Sizes(embed, heads, heads, plain + turned, 1, query_rank=0, rope_dim=turned)
    of_queries = random.standard_normal((heads * (plain + turned), embed))
    of_keys = random.standard_normal((rank + turned, embed))
    x, y = random.standard_normal((2, embed))
    angle = 3.7 * 10.0 ** -np.arange(turned // 2)  # of the distance of two tokens

    q = (of_queries @ x).reshape(heads, plain + turned)[:, plain:].reshape(heads, -1, 2)
    k = (of_keys @ y)[rank:].reshape(-1, 2)
    turning = (q @ [1, 1j]) * np.exp(1j * angle) * np.conj(k @ [1, 1j])
    want = turning.sum(-1).real

    def whole(rule, shape, tensor):
        return rule(sizes, shape).read([tensor], tuple(slice(0, size) for size in shape))

    ours_q = np.einsum(
        "e,ekd->kd", x, whole(latent_attention.queries, (embed, heads, 11), of_queries)
    )
    ours_k = y @ whole(latent_attention.down, (embed, rank + turned), of_keys)
    q, k = (each[..., -turned:] for each in (ours_q, ours_k))
    q, k = (each[..., : turned // 2] + 1j * each[..., turned // 2 :] for each in (q, k))
    np.testing.assert_allclose((q * np.exp(1j * angle) * np.conj(k)).sum(-1).real, want, rtol=1e-12)


@pytest.mark.seconds
def test_layers_of_further_tokens_come_in_and_go_out(tmp_path):
    """With the copies of the shared table and head that published files hold, and without."""
    tensors = directories.write(tmp_path / "model", FURTHER)
    import_model(tmp_path / "model", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    after = open_tensors(tmp_path / "out")
    assert after.keys() == tensors.keys()
    assert all(np.array_equal(after[name].map(), x) for name, x in tensors.items())
    left = ("model.layers.3.*", "model.layers.4.*")
    alone = ("model.multi_token=none",)
    without = import_model(tmp_path / "model", tmp_path / "alone", overrides=alone, ignored=left)
    assert not any(path.startswith("further") for path in without.params)
    # As transformers saves it: its class has no such layers, and its config.json names them.
    saved = {name: x for name, x in tensors.items() if not re.search(r"layers\.[34]\.", name)}
    directories.write(tmp_path / "saved", FURTHER, saved)
    imported = import_model(tmp_path / "saved", tmp_path / "plain")
    assert f"{tmp_path / 'saved'}: its files lack the layers that predict" in imported.lines[0]
    export_run(tmp_path / "plain", tmp_path / "without")
    assert open_tensors(tmp_path / "without").keys() == saved.keys()
    keys = json.loads((tmp_path / "without" / "config.json").read_text())
    assert keys["num_nextn_predict_layers"] == 0  # vLLM would look for them
    asked = ("model.multi_token.depth=2",)
    with pytest.raises(CheckpointError, match="further tokens; .*found 3 layers; .*multi_token"):
        import_model(tmp_path / "saved", tmp_path / "refused", overrides=asked)
    copy = "model.layers.4.shared_head.head.weight"
    with_copy = tensors | {copy: tensors["lm_head.weight"]}
    directories.write(tmp_path / "copies", FURTHER, with_copy)
    import_model(tmp_path / "copies", tmp_path / "again")
    directories.write(tmp_path / "other", FURTHER, with_copy | {copy: 2 * with_copy[copy]})
    with pytest.raises(CheckpointError, match=f"{copy} differs from lm_head.weight"):
        import_model(tmp_path / "other", tmp_path / "refused")


@pytest.mark.seconds
def test_what_is_left_out_takes_nothing_of_its_files_with_it(tmp_path):
    """Each of three files has tensors of the layers that are left out."""
    tensors = directories.write(tmp_path / "model", FURTHER, parts=3)
    left_out = ("model.layers.3.*", "model.layers.4.*")
    alone = ("model.multi_token=none",)
    import_model(tmp_path / "model", tmp_path / "run", overrides=alone, ignored=left_out)
    export_run(tmp_path / "run", tmp_path / "out")
    after = open_tensors(tmp_path / "out")
    wanted = {name: x for name, x in tensors.items() if not re.search(r"layers\.[34]\.", name)}
    assert after.keys() == wanted.keys()
    assert all(np.array_equal(after[name].map(), x) for name, x in wanted.items())


def in_8_bits(tensors: dict[str, np.ndarray]) -> tuple[dict, dict]:
    """(Tensors as DeepSeek publishes them, the numbers that they stand for.)"""
    random = np.random.default_rng(5)
    packed, wanted = dict(tensors), dict(tensors)
    for name, x in tensors.items():
        if x.ndim != 2 or not re.search(r"proj|\.w[123]\.", name):
            continue
        scales = random.uniform(0.5, 2, [-(-size // 128) for size in x.shape]).astype(np.float32)
        packed[name] = x.astype(ml_dtypes.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scales
        wanted[name] = np.empty_like(x)
        for row, column in np.ndindex(scales.shape):
            square = np.s_[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
            wanted[name][square] = packed[name][square].astype(np.float32) * scales[row, column]
    return packed, wanted


@pytest.mark.seconds
@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "qwen3"])
def test_eight_bits_and_their_scales_are_read(family, tmp_path):
    """As transformers writes them, which names no format, and as others do."""
    config = directories.CONFIGS[family]
    config = config | {"num_hidden_layers": 2, "intermediate_size": 200, "hidden_size": 136}
    packed, wanted = in_8_bits(directories.drawn(directories.tensors_of(config)))
    named = {"deepseek_v3": "e4m3", "minimax_m2": "float8_e4m3fn", "qwen3": None}[family]
    config = config | {"quantization_config": QUANTISED | {"fmt": named}}
    directories.write(tmp_path / "packed", config, packed)
    import_model(tmp_path / "packed", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", dtype="float32")
    after = open_tensors(tmp_path / "out")
    assert after.keys() == wanted.keys()
    assert all(np.array_equal(after[name].map(), x) for name, x in wanted.items())
    lost = "model.layers.1.self_attn.o_proj.weight"
    del packed[f"{lost}_scale_inv"]
    directories.write(tmp_path / "lost", config, packed)
    with pytest.raises(CheckpointError, match=f"{lost} of .* has 8 bits, and no scales"):
        import_model(tmp_path / "lost", tmp_path / "refused")
    config["quantization_config"] = QUANTISED | {"weight_block_size": [1, 128]}
    directories.write(tmp_path / "lost", config, packed)
    with pytest.raises(CheckpointError, match=r"weight_block_size=\[1, 128\]; asked"):
        import_model(tmp_path / "lost", tmp_path / "refused")
    del config["quantization_config"]
    directories.write(tmp_path / "lost", config, packed)
    with pytest.raises(CheckpointError, match=r"has dtype F8_E4M3; found quantised weights"):
        import_model(tmp_path / "lost", tmp_path / "refused")
