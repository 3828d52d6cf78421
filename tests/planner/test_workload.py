"""A workload has no settings of its own: costs read those of its run."""

import pytest
from helpers import tiny

from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.memory import step_memory
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.estimate import our_software

H100 = DEVICES["h100"]


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [
        ("model", "windows", (3,)),
        ("model", "norm_places", "both"),
        ("model", "norm_places", "parallel"),
        ("model", "sinks", True),
        ("model", "mlp", "swiglu"),
        ("train", "sequence_length", 8),
        ("train", "global_batch", 32),
        ("precision", "compute", "float32"),
        ("precision", "params", "bfloat16"),
        ("precision", "matmul", "float8"),
        ("optimizer", "moment_dtype", "8bit"),
        ("guard", "replay_check", 5),
    ],
)
def test_a_changed_setting_costs_what_a_run_with_it_costs(section, setting, value):
    config = tiny("mesh.data=2", "train.microbatch=2", "precision.compute=bfloat16")
    settings = getattr(config, section).model_copy(update={setting: value})
    itself = workload_of(config.model_copy(update={section: settings}), config.mesh.sizes)
    before = workload_of(config, config.mesh.sizes)
    changed = before.with_settings(**{section: {setting: value}})
    assert costs(changed) == costs(itself)
    assert costs(changed) != costs(before)


def costs(workload) -> tuple:
    time = step_time(workload, H100, our_software(workload.config, H100))
    return dict(time.terms), step_memory(workload), time.model_flops_per_device
