"""Keeps the memory that a step on CPUs frees for the next step, and a layer for the next layer."""

import ctypes
import os

from spmdtrain.processes.xla_flags import jax_has_started, runs_on_gpus

# Parameters of glibc's mallopt, from its malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
KEEP = {TRIM_THRESHOLD: -1, MMAP_MAX: 0, ARENA_MAX: 1}


def keep_freed_memory() -> bool:
    """Lets the process keep what it frees if jax will start on CPUs; returns whether it will.

    XLA's CPU backend asks malloc for the temporary memory of each step, in one piece. glibc maps a
    piece of more than 32 MB anew each time, and the kernel fills it with zeros, page by page: 10 to
    15 % of the CPU time of a step of a tiny GPT, and a fifth of that of an import or an export,
    whose layers are read and written one after another. So there are no maps, and nothing at the
    end of the heap goes back to the system. There is one heap for all threads, as the others are
    too small for such a piece.

    It does nothing where jax has started, as in a program that calls us: its memory is its own. Nor
    with another libc, or if the user set one of malloc's own variables.
    """
    own = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if own or jax_has_started() or runs_on_gpus():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*each) for each in KEEP.items())
