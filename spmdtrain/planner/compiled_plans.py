"""Compiles the best layouts and ranks them again by XLA's figures: `spmdtrain plan --compile K`.

A formula cannot know whether XLA compiles a layout, is off by a few per cent in the memory that is
held, and assumes that this layout hides as much traffic as the fleet does. Each layout is compiled
in a separate process, because XLA ends the process if it fails.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.planner.cost.memory import SAFE_SHARE
from spmdtrain.planner.plan import Plan

LONGEST = 1200  # seconds for one layout; 1T over 3072 devices takes about 60


@dataclass(frozen=True)
class CompiledPlan:
    """A layout, with the figures of its compiled step.

    `held` are the bytes on a device during a step, by XLA's account, and `seconds` those of a step,
    predicted with the traffic that the compiled step hides. Both are None if it did not compile;
    `problem` says why.
    """

    plan: Plan
    held: int | None = None
    seconds: float | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        safe = SAFE_SHARE * self.plan.estimate.hardware.memory
        return self.held is not None and self.held <= safe

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The sort key: the smaller, the better."""
        return not self.fits, self.held is None, self.seconds or self.plan.seconds


def compile_plans(plans: Sequence[Plan], arguments: Sequence[str]) -> list[CompiledPlan]:
    """Compiles each of `plans` for its GPUs, and ranks them: first those that fit, then by time.

    The time is that predicted for the compiled step. `arguments` are those of `spmdtrain estimate`
    common to all: the config, --hardware, --devices and the settings that were typed. It takes a
    minute or two per layout on two cores.
    """
    compiled = [_compile_plan(plan, arguments) for plan in plans]
    return sorted(compiled, key=lambda result: result.rank)


def _compile_plan(plan: Plan, arguments: Sequence[str]) -> CompiledPlan:
    pasted = [word for setting in plan.settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "spmdtrain.cli", "estimate", *arguments, *pasted]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            [*command, "--compile", "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return CompiledPlan(plan, problem=f"XLA was not done after {LONGEST} s")
    if done.returncode:
        return CompiledPlan(plan, problem=_reason(done.returncode, done.stderr))
    answer = json.loads(done.stdout.splitlines()[-1])
    held = memory_in(answer["compiled"]).held + plan.memory.copies
    return CompiledPlan(plan, held, answer["step_seconds"])


def _reason(code: int, errors: str) -> str:
    """Returns the first line that explains the failure, without the name of the program."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("spmdtrain: ") or "error:" in line]
    if not telling:
        return f"the compiler ended with {code}"
    return telling[0].removeprefix("spmdtrain: ")
