"""The parts of a step whose names XLA keeps in its text, so that a profile can tell them apart."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")

# In the order of a step. Outer parts count: the norm of queries belongs to attention.
PARTS = ("gather", "embedding", "norm", "attention", "mlp", "head", "reduction", "optimizer")
OTHER = "other"  # between them: residuals, noise, loops, parts of an own model


def part(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator: what the function traces bears the name of this part of a step.

    It changes no instruction, only what XLA writes beside it.
    """
    assert name in PARTS, name

    def named(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def inside(*args: P.args, **keywords: P.kwargs) -> T:
            with jax.named_scope(name):
                return function(*args, **keywords)

        return inside

    return named
