"""Settle what must be settled before jax looks for devices."""

import argparse
import gc
import importlib
import logging
import os
from pathlib import Path


def start_jax(parsed: argparse.Namespace) -> None:
    """Import jax for a command that computes: with its devices, and joined with other processes.

    Compiled programs are kept between runs, in the user's cache folder.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks on its own choices
    from spmdtrain.parallel import processes, xla_flags

    if parsed.simulate_devices is not None:
        processes.simulate_devices(parsed.simulate_devices)
    xla_flags.set_xla_flags()
    xla_flags.set_memory_share()
    if not has_nvidia_driver():
        # jax's CUDA plugin may be there for `make cuda-compiler`. On a machine without GPU it logs
        # a traceback over the libraries that it lacks.
        logging.getLogger("jax._src.xla_bridge").addFilter(_is_no_plugin_error)
    processes.start(parsed.coordinator, parsed.processes, parsed.process)
    _import_libraries()
    import jax

    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "spmdtrain" / "compiled"))


def has_nvidia_driver() -> bool:
    """True if the kernel module of NVIDIA's driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _is_no_plugin_error(record: logging.LogRecord) -> bool:
    return "plugin configuration error" not in str(record.msg)


def _import_libraries() -> None:
    """Import the large libraries of a run while the garbage collector rests.

    An import makes some hundred thousand objects, and all of them stay. The collector would walk
    over them again and again, which costs a sixth of the time until the first line of output.
    `gc.freeze` spares later collections, those between training steps, the same walk.
    """
    gc.disable()
    try:
        for name in ("jax", "flax.nnx", "optax", "orbax.checkpoint"):
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def without_devices() -> None:
    """Keep jax from taking hold of a GPU, for a command that asks it for shapes only.

    Call it before jax is imported, which is when jax reads the environment.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
