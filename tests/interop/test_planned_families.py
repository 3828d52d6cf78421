"""The planner counts what a model of each published family has: its parameters to the last one, and
its FLOPs as its own program does.
"""

from pathlib import Path

import directories
import pytest
from helpers import tiny

from spmdtrain.config import RunConfig
from spmdtrain.config.published.read_config import as_published
from spmdtrain.config.published.write_config import as_model
from spmdtrain.models.abstract import build_model
from spmdtrain.models.counted_flops import counted_flops_per_token
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.flops import model_flops_per_token

CONFIGS = directories.CONFIGS | directories.VARIANTS
LENGTH = 128


def run_of(config: dict) -> RunConfig:
    model = as_model(as_published(Path(), dict(config)).settings)
    model = model.model_copy(update={"max_length": max(LENGTH, model.max_length)})
    return tiny().model_copy(update={"model": model})


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.seconds
def test_parameters_and_flops_of_a_family(name):
    config = run_of(CONFIGS[name])
    model = build_model(config)
    assert shape.parameters(config.model) == model.size
    train = config.train.model_copy(update={"sequence_length": LENGTH})
    counted = counted_flops_per_token(config.model_copy(update={"train": train}), model)
    assert train_flops_per_token(config.model, LENGTH) == pytest.approx(counted, rel=0.002)
    assert model_flops_per_token(config.model, LENGTH) == pytest.approx(counted, rel=0.002)
