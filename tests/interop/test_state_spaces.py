"""Nemotron-H, Granite 4 and Falcon-H1: each variant of their files comes in and goes out as it was,
however its keys are said, and what cannot be computed is refused by its key.
"""

from pathlib import Path

import numpy as np
import pytest
import ssd_directories
from directories import tensors_of, write

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.read_config import as_published
from spmdtrain.config.published.write_config import as_model, function_of, write_config
from spmdtrain.interop.pieces import Rows, Sizes
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.interop.ssd_mixer import of_groups, of_heads, taps_of_groups, taps_of_heads
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

CASES = ssd_directories.CONFIGS | ssd_directories.VARIANTS
CASES |= ssd_directories.NOT_IN_TRANSFORMERS
INFINITY = float("inf")


def model_of(config, **changes):
    """The model of keys; `...` takes one away."""
    keys = {name: value for name, value in (config | changes).items() if value is not ...}
    return as_model(as_published(Path(), keys).settings)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_is_imported_is_exported_as_it_was(name, tmp_path):
    """Names, shapes, dtypes and bits of all tensors, of three files."""
    config = CASES[name] | {"dtype": "bfloat16"}
    write(tmp_path / "model", config, parts=3)
    import_model(tmp_path / "model", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    before, after = open_tensors(tmp_path / "model"), open_tensors(tmp_path / "out")
    assert before.keys() == after.keys() == tensors_of(config).keys()
    for tensor, expected in before.items():
        assert after[tensor].dtype == expected.dtype
        assert np.array_equal(after[tensor].map(), expected.map()), tensor
    assert {one.path.name for one in after.values()} == {one.path.name for one in before.values()}


@pytest.mark.parametrize("name", CASES)
def test_a_written_config_says_the_same_model(name):
    """Also without the keys that it was imported with."""
    model = model_of(CASES[name])
    family, keys = write_config(model, None, dtype="float32", tokens={}, run=Path("run"))
    assert family == CASES[name]["model_type"]
    assert function_of(model_of(keys)) == function_of(model)


def test_patterns_are_said_in_three_spellings():
    listed = ["linear_attention", "moe", "mlp", "linear_attention", "full_attention", "moe"]
    listed += ["linear_attention"]
    nemotron = ssd_directories.NEMOTRON
    older = [{"linear_attention": "mamba", "full_attention": "attention"}.get(x, x) for x in listed]
    for kinds in (listed, older):
        lists = {"layers_block_type": kinds, "hybrid_override_pattern": ...}
        for more in ({}, {"num_hidden_layers": ...}):
            assert model_of(nemotron, **lists, **more) == model_of(nemotron)
    granite = ssd_directories.GRANITE
    newer = [{"mamba": "linear_attention"}.get(x, "full_attention") for x in granite["layer_types"]]
    for name in ("layer_types", "layers_block_type"):
        assert model_of(granite, **{"layer_types": ...} | {name: newer}) == model_of(granite)
    assert set(model_of(granite, layer_types=...).layer_mixers) == {"ssd"}


def test_sizes_of_parts_that_no_layer_has_say_nothing():
    for pattern in ("*-*-", "M-M-", "M*M*", "MEME"):
        kinds = {"hybrid_override_pattern": pattern, "layers_block_type": ..., "conv_kernel": 3}
        model = model_of(ssd_directories.NEMOTRON, num_hidden_layers=len(pattern), **kinds)
        assert (model.ssd is None, model.experts is None) == (
            "M" not in pattern,
            "E" not in pattern,
        )


def steps(model):
    assert model.ssd is not None
    return model.ssd.smallest_step, model.ssd.largest_step


@pytest.mark.parametrize("name", ssd_directories.CONFIGS)
@pytest.mark.parametrize("infinity", [INFINITY, {"__float__": "Infinity"}])
def test_the_times_of_tokens_are_clamped_as_the_key_says(name, infinity):
    """transformers 5.24 takes `time_step_min` of Nemotron-H, which says how training begins."""
    config = CASES[name] | {"time_step_min": 0.001, "time_step_max": 0.1}
    unclamped = model_of(config, time_step_limit=[0.0, infinity])
    assert steps(unclamped) == (0, None)
    assert model_of(config, time_step_limit=...) == unclamped
    clamped = model_of(config, time_step_limit=[0.25, 1.5])
    assert steps(clamped) == (0.25, 1.5)
    _, keys = write_config(clamped, None, dtype="float32", tokens={}, run=Path("run"))
    assert keys["time_step_limit"] == [0.25, 1.5]
    _, keys = write_config(model_of(config), None, dtype="float32", tokens={}, run=Path("run"))
    assert keys["time_step_limit"] == [0.0, INFINITY]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M*Q-M*E"}, "hybrid_override_pattern='Q'"),
        ("nemotron_h", {"num_hidden_layers": 6}, "the kinds of 6 layers"),
        ("nemotron_h", {"layers_block_type": ["mlp"] * 7}, "as layers_block_type says"),
        ("nemotron_h", {"mlp_bias": True}, "the experts have no biases"),
        ("nemotron_h", {"use_bias": True}, "use_bias=True has no setting"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron_h", {"sliding_window": 7}, "sliding_window=7"),
        ("nemotron_h", {"time_step_limit": [0.5]}, "time_step_limit=.* must be two numbers"),
        ("nemotron_h", {"time_step_limit": [0.5, float("nan")]}, "time_step_limit"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "a list of 5 kinds"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
        ("granitemoehybrid", {"mamba_d_head": 7}, "mamba_n_heads=6 must be a divisor"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "a list of 5 factors"),
        ("falcon_h1", {"mlp_multipliers": [0.0, 1.0]}, "numbers above 0"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_has_no_setting_is_refused_by_its_key(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        model_of(CASES[name], **changes)


def test_two_parameters_share_the_rows_of_a_tensor():
    """Each row of a tensor is of one of the two, and comes back to its place."""
    groups, group, head_dim, state, taps, embed = 2, 3, 5, 4, 3, 7
    inner, heads = groups * group * head_dim, groups * group
    sizes = Sizes(embed, 1, 1, 1, 1, state_heads=heads, state_width=inner, state=state)
    channels = inner + 2 * groups * state
    for file, parts in (
        (
            (inner + channels + heads, embed),
            (
                of_heads(sizes, (embed, groups, group, 2 * head_dim + 1)),
                of_groups(sizes, (embed, groups, 2 * state)),
            ),
        ),
        (
            (channels, 1, taps),
            (
                taps_of_heads(sizes, (groups, group, head_dim, taps)),
                taps_of_groups(sizes, (groups, 2 * state, taps)),
            ),
        ),
    ):
        tensor = np.arange(np.prod(file)).reshape(file)
        again = np.full(file, -1)
        for mapped in parts:
            assert mapped.shapes == (file,)
            parameter = mapped.read([tensor], tuple(slice(0, size) for size in mapped.shape))
            (written,) = mapped.write(parameter)
            assert isinstance(written, Rows)
            for cut in written.rows:
                assert (again[cut] == -1).all()
                again[cut] = written.tensor[cut]
        assert np.array_equal(again, tensor)
    # The first rows are the gates of the first head of the first group; its keys follow all values.
    of_first = parts_of_tensor(sizes, (embed, groups, group, 2 * head_dim + 1))
    assert of_first == [0, inner, 2 * inner + 2 * groups * state]


def parts_of_tensor(sizes, shape):
    """The first row of each part of the heads of one tensor."""
    return [piece.rows.start for piece in of_heads(sizes, shape).pieces]
