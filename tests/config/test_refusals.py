"""The refusals between sections: a run asks for all of them, and they read settings that exist."""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fuzz.settings import classes
from helpers import tiny

import spmdtrain as st
from spmdtrain.config import RunConfig, schema
from spmdtrain.config.schema.run import OF_STEPS, REFUSALS


def section_modules() -> list:
    walked = pkgutil.walk_packages(schema.__path__, f"{schema.__name__}.")
    return [importlib.import_module(module.name) for module in walked]


def refusals_of(module) -> list[Callable]:
    functions = [value for name, value in vars(module).items() if name.startswith("refusals")]
    return [function for function in functions if function.__module__ == module.__name__]


def test_a_run_is_asked_about_every_refusal():
    written = {function for module in section_modules() for function in refusals_of(module)}
    assert written, "the functions are found by their names"
    assert written <= {*REFUSALS, *OF_STEPS}


def settings_read(source: str) -> Iterator[tuple[str, str]]:
    """(section, setting) of each `run.SECTION.SETTING`, and (section, "") of each `run.SECTION`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(ast.Attribute(ast.Name("run"), section), setting):
                yield section, setting
            case ast.Attribute(ast.Name("run"), section):
                yield section, ""


@pytest.mark.parametrize("module", section_modules(), ids=lambda module: module.__name__)
def test_refusals_read_settings_that_exist(module):
    """A checker of types cannot know: the run is `Any` to its sections."""
    for section, setting in settings_read(Path(module.__file__).read_text(encoding="utf-8")):
        choices = classes(RunConfig.model_fields[section].annotation)
        missing = [kind for kind in choices if not setting_exists(kind, setting)]
        assert not missing, f"run.{section}.{setting}"


def setting_exists(kind: type, setting: str) -> bool:
    return not setting or setting in kind.model_fields or hasattr(kind, setting)


def test_a_setting_that_does_not_exist_is_found():
    assert list(settings_read("if run.islands.number > run.train.steps: ...")) == [
        ("islands", "number"),
        ("train", "steps"),
        ("islands", ""),
        ("train", ""),
    ]
    (islands,) = classes(RunConfig.model_fields["islands"].annotation)
    assert setting_exists(islands, "are_several")
    assert not setting_exists(islands, "number")


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_sequence_that_is_too_long_may_be_cut_or_where_positions_allow_it_stretched(positions):
    name = "llama" if positions == "rope" else "gpt"
    with pytest.raises(st.UserError, match="is longer than") as refused:
        tiny(f"model.name={name}", "model.max_length=16", "train.sequence_length=48")
    assert "; try --set train.sequence_length=16" in str(refused.value)
    assert ("or --set model.max_length=48" in str(refused.value)) == (positions == "rope")
