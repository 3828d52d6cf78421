"""Starts jax, after everything that must be settled before it looks for devices."""

import argparse
import contextlib
import gc
import importlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from spmdtrain.config import ConfigError, UserError


def start_jax(
    parsed: argparse.Namespace,
    *,
    alone: bool = False,
    find_devices: bool = True,
    keeps_memory: bool = False,
) -> None:
    """Imports jax for a command that computes, with its devices, and joins other processes.

    With `alone` it joins other processes only if the arguments name them, even under a scheduler.
    With `find_devices` it refuses a machine on which jax finds none. With `keeps_memory` freed
    memory stays with the process, for the next step or layer. Compiled programs stay in the user's
    cache folder between runs. Raises ConfigError if jax, XLA or a scheduler cannot use the
    environment.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides XLA's remarks on its own choices
    _forget_empty_variables()
    from spmdtrain.processes import kept_memory, native_output, processes, xla_flags

    xla_flags.check_xla_flags()
    if parsed.simulate_devices is not None:
        processes.simulate_devices(parsed.simulate_devices)
    xla_flags.set_xla_flags()
    xla_flags.set_memory_share()
    if keeps_memory:
        kept_memory.keep_freed_memory()
    if not has_nvidia_driver():
        # jax's CUDA plugin may be installed for `make cuda-compiler`. On a machine without a GPU
        # it logs a traceback about missing libraries.
        logging.getLogger("jax._src.xla_bridge").addFilter(_is_no_plugin_error)
    with _blaming_the_environment():
        addresses = (parsed.coordinator, parsed.processes, parsed.process)
        if addresses != (None, None, None) or not alone:
            processes.start(*addresses)
        _import_libraries()
        import jax

        if jax.distributed.is_initialized():
            native_output.drop_remarks()

        if find_devices:
            jax.local_devices()

    if not jax.config.values["jax_compilation_cache_dir"]:
        # Without a home, as for a user id unknown to the system, every start compiles again.
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if not cache.startswith("~"):
            compiled = str(Path(cache) / "spmdtrain" / "compiled")
            jax.config.update("jax_compilation_cache_dir", compiled)


def _forget_empty_variables() -> None:
    """Unsets empty variables, which jax would read as a number, an address or a path."""
    for name, value in [*os.environ.items()]:
        if name.startswith(("JAX_", "XLA_")) and not value.strip():
            del os.environ[name]


@contextlib.contextmanager
def _blaming_the_environment() -> Iterator[None]:
    """Turns jax's errors about its variables or about missing devices into one line."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, RuntimeError, AssertionError) as error:
        message = " ".join(str(error).split())
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if (
            not message and platforms
        ):  # jax's message for a GPU platform without its plugin is empty
            message = f"no device of the platforms {platforms!r}"
        if not re.search(r"jax[ _]flag|environment|backend|platforms|\bjax_\w+", message, re.I):
            raise
        variables = {
            name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))
        }
        named = [name for name in variables if re.search(rf"\b{name}\b", message, re.I)] or [
            *variables
        ]
        raise ConfigError(
            f"jax does not start: {message[:300]}",
            found=" ".join(f"{name}={variables[name][:80]!r}" for name in named),
            fix=" ".join(["unset", *named]) if named else "spmdtrain doctor",
        ) from None


def has_nvidia_driver() -> bool:
    """Returns True if the kernel module of NVIDIA's driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def opens_gpus(parsed: argparse.Namespace) -> bool:
    """Returns True if this machine has a GPU, and a command with these arguments may open it."""
    hidden = os.environ.get("JAX_PLATFORMS") == "cpu" or parsed.simulate_devices is not None
    return not hidden and has_nvidia_driver()


def _is_no_plugin_error(record: logging.LogRecord) -> bool:
    return "plugin configuration error" not in str(record.msg)


def _import_libraries() -> None:
    """Imports the large libraries of a run with the garbage collector switched off.

    An import makes some hundred thousand objects, which all stay alive. The collector would visit
    them again and again, which costs a sixth of the time until the first line of output.
    `gc.freeze` spares later collections, between training steps, the same visits.
    """
    gc.disable()
    try:
        for name in ("jax", "flax.nnx", "optax", "orbax.checkpoint"):
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def join_without_devices(parsed: argparse.Namespace) -> None:
    """Imports jax and occupies no GPU, and joins other processes if the arguments name them.

    Memory freed by one layer stays with the process, for the next one.
    """
    without_devices(keeps_memory=True)
    addresses = (parsed.coordinator, parsed.processes, parsed.process)
    if addresses != (None, None, None):
        from spmdtrain.processes import processes

        processes.start(*addresses)


def without_devices(*, keeps_memory: bool = False) -> None:
    """Imports jax for a command that only needs shapes, and occupies no GPU.

    keeps_memory: see `start_jax`.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    _forget_empty_variables()
    from spmdtrain.processes import kept_memory, xla_flags

    xla_flags.check_xla_flags()
    if keeps_memory:
        kept_memory.keep_freed_memory()
    with _blaming_the_environment():
        _import_libraries()
