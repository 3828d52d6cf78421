"""Settings that only a whole run has, and those that name other runs: sections say which."""

import re
from typing import Any, get_args

import pytest
from helpers import tiny

from spmdtrain.config import RunConfig, from_resolved, resolved
from spmdtrain.config.sections import tables
from spmdtrain.config.settings import LocalPath
from spmdtrain.config.whole_run import leave_out, of_whole_run

STAGES = {"train": {"stages": [{"until": 2, "global_batch": 8}]}}
WHOLE = {
    "train.stages": STAGES,
    "optimizer.rate_by_batch": STAGES | {"optimizer": {"rate_by_batch": "sqrt"}},
    "distill.": {"distill": {"teacher": "gone", "temperature": 2.0}},
}


@pytest.mark.parametrize("name", of_whole_run())
def test_what_only_a_whole_run_has_is_left_out(name):
    """All that is named is of settings that exist, and has its default afterwards."""
    values, plain = resolved(tiny())["config"], read(resolved(tiny())["config"])
    for section, settings in WHOLE[name].items():
        values[section] |= settings
    assert read(values) != plain
    leave_out(values)
    assert read(values) == plain


def read(values: dict[str, dict[str, Any]]) -> RunConfig:
    return from_resolved({"config": values, "origin": {}})


def test_every_setting_that_names_a_run_is_among_the_other_runs():
    named = {
        f"{section}.{name}"
        for section, kind in tables()
        for name, setting in kind.model_fields.items()
        if LocalPath in get_args(setting.annotation) and re.search(r"\brun\b", setting.description)
    }
    assert "train.init_from" in named
    config = tiny(*(f"{name}=elsewhere" for name in named))
    assert config.other_runs() == dict.fromkeys(named, "elsewhere")
    assert tiny().other_runs() == {}
