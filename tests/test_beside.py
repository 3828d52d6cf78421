"""benchmarks/beside: steps of other hands beside ours; only those of the same model count."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BESIDE = ROOT / "benchmarks" / "beside"
sys.path.append(str(BESIDE))
import in_maxtext  # noqa: E402 - a folder of scripts
from shapes import HELD, SPARE, configuration, least_bytes  # noqa: E402

OURS = {
    "seconds": 0.5,
    "losses": [4.0, 3.9, 3.8],
    "parameters": 10,
    "tokens": 100,
    "flops_per_token": 2.0,
    "peak": 1000.0,
    "peak_bytes": 7,
    "device": "G",
    "version": "jax",
}


@pytest.fixture(scope="module")
def beside():
    """The module that runs as a folder."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("beside_main", BESIDE / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_medians_and_ratios_of_the_rounds(beside):
    comparison = beside.Comparison("gpt2_124m", on_cpu=False)
    for ours, torch in ((0.5, 0.7), (0.4, 0.8), (0.6, 0.75)):
        comparison.add("ours", OURS | {"seconds": ours})
        comparison.add("torch", OURS | {"seconds": torch, "losses": [4.001, 3.91, 3.81]})
    found = comparison.document()
    assert found["failed"] == {} and found["torch"]["rounds"] == [0.7, 0.8, 0.75]
    assert found["torch_to_ours"] == pytest.approx(1.5) and found["ours"]["mfu"] == 0.4
    assert beside.last_line([found]) == "gpt2_124m: time of torch 1.50 of ours"
    assert "500.0 ms (400.0 to 600.0)" in beside.line(found, "ours")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"failed": "no CUDA"}, "no CUDA"),
        ({"parameters": 11}, "another model: 11 parameters, not 10"),
        ({"losses": [4.1, 3.9, 3.8]}, "another model: losses"),
        ({"losses": [float("nan"), 3.9, 3.8]}, "another model: losses"),
    ],
)
def test_who_fails_or_trains_another_model_has_no_figures(changed, why, beside):
    comparison = beside.Comparison("gpt2_124m", on_cpu=False)
    comparison.add("ours", OURS)
    comparison.add("bare", OURS)
    comparison.add("bare", OURS | changed)
    found = comparison.document()
    assert found["failed"]["bare"].startswith(why) and "bare" not in found
    assert found["ours"]["seconds"] == 0.5


def test_a_shape_that_does_not_fit_is_left_out_and_said(beside, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(beside, "memory_here", lambda: 80e9)
    monkeypatch.setattr(beside, "contenders", lambda _: {})
    written = tmp_path / "beside.json"
    monkeypatch.setattr(sys, "argv", ["beside", "--shapes", "llama_8b", "--json", str(written)])
    with pytest.raises(SystemExit) as ended:
        beside.main()
    assert ended.value.code == 0 and written.exists()
    assert "llama_8b is left out: it needs 148 GB, this GPU has 80" in capsys.readouterr().out


def test_the_shapes_have_their_published_sizes():
    sizes = {"gpt2_124m": 124e6, "llama_1b": 1.236e9, "llama_8b": 8.03e9}
    for shape, parameters in sizes.items():
        found = least_bytes(configuration(shape, dry=False)) / HELD / SPARE
        assert found == pytest.approx(parameters, rel=0.01), shape


def test_maxtext_is_asked_for_the_same_model_and_its_lines_are_read():
    asked = in_maxtext.settings(configuration("llama_8b", dry=False))
    assert (asked["base_mlp_dim"], asked["base_num_kv_heads"]) == (14336, 8)
    assert (asked["max_target_length"], asked["logits_via_embedding"]) == (4096, False)
    line = "completed step: {}, seconds: {}, TFLOP/s/device: 400.1, Tokens/s/device: 9.0, loss: 1\n"
    text = "".join(line.format(*each) for each in ((0, 60.5), (1, 2.0), (2, 0.5), (3, 0.75)))
    assert in_maxtext.seconds_in(text, skipped=2) == 0.625
    with pytest.raises(SystemExit, match="printed no time"):
        in_maxtext.seconds_in("nothing", skipped=2)


ALONE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ImportError(name + " is not installed in the environment of PyTorch")
sys.meta_path.insert(0, Missing())
import shapes
shapes.configuration("llama_1b", dry=False)
"""


def test_the_environment_of_pytorch_needs_no_jax():
    """It has what rented.sh installs: numpy, pydantic and lazy-loader beside torch."""
    missing = "jax jaxlib flax optax orbax jinja2 rich safetensors tensorstore"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{BESIDE}"}
    subprocess.run([sys.executable, "-c", ALONE, missing], env=environment, check=True)
