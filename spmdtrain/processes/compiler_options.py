"""Decides how much work XLA's compiler puts into a program."""

import os

LLVM_LEVEL = "xla_backend_optimization_level"


def options_of_one_run(platform: str) -> dict[str, int] | None:
    """Returns the compiler options of a program that this process runs once, on this platform.

    On CPUs LLVM takes a third of the time with the first of its levels, and the numbers are those
    of the last one, to the bit (jax 0.10 and 0.12; at level 0 they are not). None leaves it to
    XLA, and to the user who named a level in XLA_FLAGS.
    """
    is_given = f"--{LLVM_LEVEL}" in os.environ.get("XLA_FLAGS", "")
    return None if platform != "cpu" or is_given else {LLVM_LEVEL: 1}
