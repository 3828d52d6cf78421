"""Decides how much work XLA's compiler puts into a program."""

import os

LLVM_LEVEL = "xla_backend_optimization_level"


def options_of_one_run(platform: str) -> dict[str, int] | None:
    """Returns the compiler options of a program that this process runs once, on this platform.

    On CPUs LLVM takes a third of the time at level 1, and the numbers equal those of the highest
    level bit for bit (jax 0.10 and 0.12; at level 0 they do not). None leaves the level to XLA, or
    to the user who set one in XLA_FLAGS.
    """
    is_set = f"--{LLVM_LEVEL}" in os.environ.get("XLA_FLAGS", "")
    return None if platform != "cpu" or is_set else {LLVM_LEVEL: 1}
