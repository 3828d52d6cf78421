"""Eight simulated CPU devices for every test, and the two kinds of test that do not always run.

JAX_PLATFORMS is respected where it is set: `JAX_PLATFORMS=cuda make test PYTEST_ARGS="-m gpu"` on a GPU box.
"""

import os
import tempfile

import pytest

DEVICE_COUNT = "--xla_force_host_platform_device_count"

# Before anything imports jax: it reads both once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = {DEVICE_COUNT: 8}
if os.environ["JAX_PLATFORMS"] == "cpu":
    FLAGS["--xla_backend_optimization_level"] = 0  # half the compile time, and tiny programs need no speed
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()
# Tests compile the same tiny programs over and over, in this process and in those they start.
_compiled = tempfile.TemporaryDirectory(prefix="spmdtrain-tests-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def gpu_is_there() -> bool:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        return False
    import jax

    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(config, items):
    wants_slow = "slow" in config.option.markexpr or os.environ.get("SPMDTRAIN_SLOW") == "1"
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reasons = []
    if gpu and not gpu_is_there():
        reasons.append(("gpu", gpu, "no GPU here, or JAX_PLATFORMS=cpu"))
    if not wants_slow:
        reasons.append(("slow", [item for item in items if item.get_closest_marker("slow")], "-m slow runs it"))
    config.left_out = [
        f"{len(left_out)} tests marked {mark} are skipped: {why}" for mark, left_out, why in reasons if left_out
    ]
    for mark, left_out, why in reasons:
        for item in left_out:
            item.add_marker(pytest.mark.skip(reason=f"{mark}: {why}"))


def pytest_report_collectionfinish(config):
    return config.left_out
