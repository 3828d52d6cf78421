"""[guard]: what counts as a bad step, and how a run responds to one."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Derived,
    DerivedOrNone,
    NonNegative,
    Positive,
    Settings,
)


class GuardConfig(Settings):
    """The response to a bad step: one whose loss or gradient is too large or not finite."""

    decides: ClassVar = {
        **dict.fromkeys(("replica_check", "replay_check", "most_skipped"), "none"),
        "": "update",
    }

    policy: Literal["abort", "skip", "rollback"] = Field(
        default="abort",
        description="abort: the run ends with exit code 9, before it saves | "
        "skip: weights and optimizer state do not change, and the next batch follows | "
        "rollback: skip, and after most_skipped go back to the last good checkpoint, leaving out "
        "the samples since then",
    )
    grad_norm: Positive | None = Field(
        default=None,
        description="largest gradient norm of a good step, before clipping; none: any finite "
        "norm is good",
    )
    expert_load: Positive | None = Field(
        default=None,
        description="largest number of tokens of an expert, as a multiple of its layer's mean; "
        "above it the router has collapsed, and the run ends with exit code 9 under "
        "any policy; none: no limit",
    )
    sigmas: Derived[NonNegative] = Field(
        default=None,
        description="a loss or gradient norm is too large above mean + sigmas standard deviations "
        "of the last good steps; 0: switched off; default: 6 (skip, rollback), 0 (abort)",
    )
    window: DerivedOrNone[Annotated[int, Field(ge=2, lt=2**20)]] = Field(
        default=None,
        description="number of last good steps that give the mean and deviation for sigmas, "
        "which takes effect once half of them have been taken; default: 128",
    )
    replica_check: CountOrZero = Field(
        default=0,
        description="steps between comparisons of the copies of weights and optimizer state that "
        "several devices hold, and also before each save; a device whose bits differ is named, and "
        "the run ends with exit code 11; 0: never",
    )
    replay_check: CountOrZero = Field(
        default=0,
        description="steps between checks that repeat a step with its shards on other devices, "
        "from a copy of the state; a device that computes different bits is named, "
        "and the run ends with exit code 11; needs room for two more states; 0: never",
    )
    most_skipped: Count = Field(
        default=10,
        description="consecutive steps that may be skipped; at one more the run aborts (skip) or "
        "goes back (rollback)",
    )

    def derived(self) -> dict[str, Any]:
        """Returns the settings that judge spikes, which depend on the policy."""
        sigmas = self.sigmas if self.is_given("sigmas") else None
        if sigmas is None:
            sigmas = 0.0 if self.policy == "abort" else 6.0
        return {"sigmas": sigmas, "window": 128 if sigmas else None}

    def affecting_numbers(self) -> dict[str, Any]:
        return self.as_given() if self.in_step else {}

    @model_validator(mode="after")
    def _check(self):
        if self.window is not None and not self.judges_spikes:
            raise ValueError(
                f"guard.window={self.window} has no effect while guard.sigmas is 0; "
                "set guard.sigmas=6"
            )
        return self

    @property
    def judges_spikes(self) -> bool:
        """True if a step is compared with the good steps before it."""
        return self.sigmas > 0

    @property
    def in_step(self) -> bool:
        """True if the compiled step judges itself, and keeps the old weights after a bad step."""
        return self.policy != "abort" or self.judges_spikes


def refusals_of_rollback(run: Any) -> Iterator[str]:
    """Yields a refusal if a rollback would find no checkpoint to go back to."""
    if run.guard.policy == "rollback" and run.checkpoint.every == 0:
        yield (
            "guard.policy='rollback' goes back to a checkpoint, but checkpoint.every=0 saves "
            "none during the run; set checkpoint.every='auto'"
        )


def refusals_of_routers(run: Any) -> Iterator[str]:
    """Yields a refusal if there is no router whose load could be limited."""
    limit = run.guard.expert_load
    if limit is not None and not run.model.experts and not run.model.make:
        yield f"guard.expert_load={limit:g} limits routers, and there is no [model.experts]"
