"""A router that has collapsed ends the run, and its layer is named."""

from types import SimpleNamespace
from typing import Any

import pytest

from spmdtrain.config import ConfigError, RunConfig
from spmdtrain.config.errors import DivergedError
from spmdtrain.config.schema import GuardConfig
from spmdtrain.running.guards.guard import Guard

FIGURES = {"loss": 1.0, "grad_norm": 1.0, "expert_load": 3.5, "expert_load_layer": 4.0}
EXPERTS = {"count": 8, "chosen": 2}


def guard(**settings) -> Guard:
    def diverged(_step: int, what: str, fix: str) -> DivergedError:
        return DivergedError(what, fix=fix)

    saves: Any = SimpleNamespace(diverged=diverged, bad_steps=SimpleNamespace(in_a_row=0))
    reporter: Any = None
    return Guard(GuardConfig(**settings), saves, reporter)


@pytest.mark.parametrize("policy", ["abort", "skip", "rollback"])
def test_a_collapsed_router_is_named(policy):
    with pytest.raises(DivergedError) as ended:
        guard(policy=policy, expert_load=3.0).check(7, FIGURES)
    said = str(ended.value)
    assert "the router of layer 4 has collapsed: at step 7 an expert has 3.5 times" in said
    assert "model.experts.bias_rate" in said


def test_a_load_within_the_limit_or_without_one_goes_on():
    guard(expert_load=3.5).check(7, FIGURES)
    guard().check(7, FIGURES)


def test_a_limit_of_loads_needs_experts():
    with pytest.raises(ConfigError, match=r"guard\.expert_load=3 limits routers"):
        RunConfig(guard={"expert_load": 3.0})
    RunConfig(model={"name": "llama", "experts": EXPERTS}, guard={"expert_load": 3.0})
