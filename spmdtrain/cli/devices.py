"""What has to be settled before jax looks for devices."""

import argparse
import os
from pathlib import Path


def start_jax(parsed: argparse.Namespace) -> None:
    """Devices and processes are settled before jax looks for them; compiled programs are kept between runs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks on its own choices
    from spmdtrain.parallel import processes

    if parsed.simulate_devices is not None:
        processes.simulate_devices(parsed.simulate_devices)
    processes.start(parsed.coordinator, parsed.processes, parsed.process)
    import jax

    if not jax.config.jax_compilation_cache_dir:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmdtrain" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def without_devices() -> None:
    """jax is asked for shapes only: it need not take hold of a GPU. It reads this when it is imported, not later."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
