"""Defines the teacher of a run: a second, frozen model, which reads the same batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import DistillConfig, RunConfig
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.train.batch import choose_context_method
from spmdtrain.train.joined import Joined, LearnedFrom
from spmdtrain.train.setup import Setup

NAME = "teacher"  # of the part and of its item
DISTILLED = "distill_loss"  # reported; its gradient is in that of the loss


class OnDisk(Protocol):
    """The weights of a model on disk, which can be read any number of times."""

    def read(self) -> dict[str, jax.Array]:
        """Returns the weights at rest, by path, in new arrays: a step donates those it gets."""
        ...

    def fingerprint(self) -> str:
        """Returns a string that identifies these weights, the same on every mesh."""
        ...


@dataclass(frozen=True)
class Teacher(Joined):
    """The model that a run learns from: frozen, on the same mesh, by the same rules.

    `setup` is that of a run of its own, in which every weight is frozen. `settings`: the section
    that names it. `on_disk` reads its weights; None: nobody has opened them.
    """

    setup: Setup
    settings: DistillConfig
    on_disk: OnDisk | None = None

    @property
    def opened(self) -> OnDisk:
        """The weights on disk. Raises ConfigError if nobody has opened them."""
        if self.on_disk is None:
            raise ConfigError(
                "the weights of the teacher have not been opened",
                fix="setup = st.with_teacher(setup), and a state of that setup",
            )
        return self.on_disk

    def read(self) -> dict[str, jax.Array]:
        """Returns the weights at rest, by path. Raises ConfigError if nobody has opened them."""
        return self.opened.read()

    def check_without_items(self) -> None:
        raise ConfigError(
            "a loss against a teacher is no function of params and batch alone",
            asked=f"distill.teacher={self.settings.teacher!r}",
            fix="st.make_step, whose state holds the teacher",
        )

    def learns_from(self) -> dict[str, LearnedFrom]:
        if self.on_disk is None:
            return {}
        return {NAME: LearnedFrom(self.settings.source, self.on_disk.fingerprint())}

    def lines(self, quantity: Callable[[int], str]) -> list[str]:
        size = quantity(self.setup.model.size)
        return [f"teacher: {size} parameters of {self.settings.teacher}"]

    def flops_per_token(self, length: int) -> float:
        return train_flops_per_token(self.setup.config.model, length) / 3  # its forward pass

    def of_batches(self, change: Callable[[RunConfig], RunConfig]) -> "Teacher":
        """Returns the same teacher for a run with different batches, given the changed settings."""
        setup = self.setup
        config = change(setup.config)
        method = choose_context_method(config, setup.rules, setup.model.order_reason)
        return replace(self, setup=replace(setup, config=config, context_method=method))


def teacher_of(setup: Setup) -> Teacher | None:
    """Returns the teacher whose weights the state of a run holds; None if it has none."""
    teacher = setup.own.get(NAME)
    return teacher if isinstance(teacher, Teacher) else None


def with_opened(setup: Setup, on_disk: OnDisk) -> Setup:
    """Returns the setup of a run whose teacher has these weights."""
    teacher = teacher_of(setup)
    assert teacher is not None, "the run has one"
    return replace(setup, own={**setup.own, NAME: replace(teacher, on_disk=on_disk)})


def check_loss(setup: Setup) -> None:
    """Refuses a custom loss, and a model that does not predict the next token."""
    if setup.loss is not None:
        what = f"{setup.config.distill.source} has a loss of its own, beside loss="
        raise ConfigError(what, fix="one of both")
    if setup.model.corrupt is not None:
        source = setup.config.distill.source
        name, _, _ = source.partition("=")
        raise ConfigError(
            f"{source} predicts the next token, and this model restores tokens",
            fix=f"--set {name}=none",
        )
