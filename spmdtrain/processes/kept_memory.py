"""Keeps freed memory in the process: on CPUs the next step, or the next layer, takes as much."""

import ctypes
import os

from spmdtrain.processes.xla_flags import jax_has_started, runs_on_gpus

# Parameters of glibc's mallopt, from its malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
KEEP = {TRIM_THRESHOLD: -1, MMAP_MAX: 0, ARENA_MAX: 1}


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory if jax will start on CPUs. Returns whether it will keep it.

    XLA's CPU backend asks malloc for the temporary memory of each step, in one piece. glibc maps a
    piece of more than 32 MB again each time, and the kernel fills it with zeros, page by page: 10
    to 15 % of the CPU time of a step of a tiny GPT, and a fifth of that of an import or an export,
    whose layers are read and written one after another. So malloc maps nothing, and returns nothing
    at the end of the heap to the system. All threads share one heap, as the others are too small
    for such a piece.

    It does nothing if jax has started, as in a program that calls us, which manages its memory
    itself; with another libc; or if the user set one of malloc's variables.
    """
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_set or jax_has_started() or runs_on_gpus():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*option) for option in KEEP.items())
