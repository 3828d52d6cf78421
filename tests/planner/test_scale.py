"""Traffic at real numbers of devices, read off the step compiled for GPUs that are not there.

With the work of a device fixed, no collective may carry more bytes on more devices: otherwise a run
stops scaling somewhere, and no test on eight devices would see it.
"""

import importlib.util
from pathlib import Path

import pytest
from compiled_estimates import compiled_estimate

CONFIG = """
[model]
name = "llama"
layers = 2
embed = 1024
heads = 8
kv_heads = 2
vocab = 4096
tied = false
[train]
microbatch = 1
sequence_length = 256
remat = "full"
[optimizer]
warmup = 0
[precision]
compute = "bfloat16"
"""
# (numbers of devices, settings): each device works on two microbatches of one sequence.
LAYOUTS = {
    "fsdp": ((8, 256), ("mesh.fsdp={all}", "train.global_batch={twice}")),
    "data, ZeRO-1": ((8, 256), ("mesh.data={all}", "train.zero=1", "train.global_batch={twice}")),
    "fsdp and tensor": (
        (8, 256),
        ("mesh.fsdp={half}", "mesh.tensor=2", "train.global_batch={all}"),
    ),
}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax's CUDA plugin"
    ),
]


def carried(path: Path, devices: int, settings: tuple[str, ...]) -> dict[tuple, int]:
    """Bytes of the collectives on this many H100s, by (kind, mesh axes, whether in a loop)."""
    sizes = {"all": devices, "half": devices // 2, "twice": 2 * devices}
    arguments = [str(path), "--hardware", "h100", "--devices", str(devices)]
    estimate = compiled_estimate(arguments, [setting.format(**sizes) for setting in settings])
    found = estimate["compiled"]["collectives"]
    return {(each["kind"], each["axis"], each["inside_loop"]): each["bytes"] for each in found}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_collective_carries_more_on_more_devices(layout, tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(CONFIG)
    numbers, settings = LAYOUTS[layout]
    fewest, *more = (carried(path, devices, settings) for devices in numbers)
    assert fewest, "there must be collectives to compare"
    for found in more:
        assert found.keys() == fewest.keys()
        grown = {each: (fewest[each], found[each]) for each in found if found[each] > fewest[each]}
        assert not grown
