"""What a step on CPUs frees is there for the next one."""

import os
import subprocess
import sys

import jax
import pytest

from spmdtrain.cli import main
from spmdtrain.processes import kept_memory
from spmdtrain.processes.kept_memory import keep_freed_memory

# Faults of two arrays of 100 MB one after the other, made by a thread like XLA's.
PROGRAM = """
import resource, sys, threading
import numpy as np
from spmdtrain.processes.kept_memory import keep_freed_memory
kept = keep_freed_memory()
def fill():
    np.empty(100_000_000, np.uint8).fill(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, faults(), faults())
"""


def run(**given: str) -> tuple[bool, int, int]:
    own = ("MALLOC_", "GLIBC_TUNABLES")
    environment = {name: x for name, x in os.environ.items() if not name.startswith(own)}
    environment |= {"JAX_PLATFORMS": "cpu"} | given
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    kept, first, second = done.stdout.split()
    return kept == "True", int(first), int(second)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_the_second_array_takes_the_pages_of_the_first():
    kept, first, second = run()
    assert kept
    assert second < first / 4


def test_the_settings_of_a_person_stay():
    assert not run(MALLOC_ARENA_MAX="2")[0]
    assert not run(GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0]


def test_a_program_in_which_jax_has_started_keeps_its_own_memory():
    jax.devices()
    assert not keep_freed_memory()


@pytest.mark.parametrize(
    "command", [["import", "DIR", "--out", "RUN"], ["export", "RUN", "--to", "hf", "DIR"]]
)
def test_commands_that_read_layer_after_layer_keep_memory(command, monkeypatch):
    class KeptError(Exception):
        pass

    def keep() -> None:
        raise KeptError

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(kept_memory, "keep_freed_memory", keep)
    with pytest.raises(KeptError):
        main(command)
