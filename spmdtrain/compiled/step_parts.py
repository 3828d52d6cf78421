"""Names the parts of a step in XLA's text, so that a profile can tell them apart."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")

# In the order of a step. Outer parts count: the norm of queries belongs to attention.
PARTS = ("gather", "embedding", "norm", "attention", "mlp", "head", "reduction", "optimizer")
OTHER = "other"  # everything else: residuals, noise, loops, parts of a custom model


def part(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator that gives everything the function traces the name of this part of a
    step.

    It changes no instruction, only its metadata.
    """
    assert name in PARTS, name

    def named(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def inside(*args: P.args, **keywords: P.kwargs) -> T:
            with jax.named_scope(name):
                return function(*args, **keywords)

        return inside

    return named
