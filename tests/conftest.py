"""Eight simulated CPU devices for every test, compiled as cheaply as XLA can, and the tests that
run only when asked.

JAX_PLATFORMS is respected where it is set, as `make test-gpu` sets it.
"""

import gc
import importlib.metadata
import inspect
import os
import re
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import shares
from typed_again import every_try_can_be_typed  # noqa: F401  a fixture of every test

# Before anything imports jax: it reads all of this once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = {"--xla_force_host_platform_device_count": 8}
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Half the compile time, and tiny programs need no speed.
    FLAGS["--xla_backend_optimization_level"] = 0
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # Again half of what is left. Later ones have no other way to emit a fusion.
        FLAGS["--xla_backend_extra_options"] = "xla_cpu_disable_new_fusion_emitters"
        FLAGS["--xla_cpu_parallel_codegen_split_count"] = 1
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()

# No test reads which line of Python an instruction comes from, and XLA carries it through each of
# its passes: a twentieth of the time that a compile takes.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Tests compile the same tiny programs over and over, in this process and in those they start. The
# workers of pytest-xdist inherit the directory of the process that started them.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="spmdtrain-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Where no bytecode may be written next to the sources, each program that a test starts would
# compile all of ours anew: a third of the time it takes to start.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    _bytecode = tempfile.TemporaryDirectory(prefix="spmdtrain-bytecode-")
    os.environ["PYTHONPYCACHEPREFIX"] = _bytecode.name


# A program that a test starts in another folder imports the tree of the test: a relative path would
# lead nowhere there, and the program to what is installed.
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
TREE = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in (*PATHS, TREE))


# A make that runs these tests exports what it was called with: a make or a script that a test
# starts would take over its Python and its arguments.
MAKEFILE = Path(__file__).parent.parent / "Makefile"
SETTABLE = re.findall(r"^(\w+) \?=", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
for name in [*os.environ]:
    if name in SETTABLE or name.startswith("MAKE") or name == "MFLAGS":
        del os.environ[name]


# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

# Files that take a minute and more alone: they begin, so that none is left over at the end, when
# the other workers have nothing to do.
HEAVIEST = {
    f"test_{name}.py"
    for name in (
        "layouts",
        "pipeline_run",
        "deviceless",
        "resume",
        "fuzz",
        "seams",
        "families",
        "pipeline_gradients",
        "docs",
        "scale",
        "faults",
        "launch",
        "fleet",
        "adapters",
    )
}


def gpu_is_there() -> bool:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        return False
    import jax

    return jax.default_backend() == "gpu"


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        choices=shares.SHARES,
        help="first: what make test runs; second: the rest, for a newer Python (tests/shares.py)",
    )
    parser.addoption(
        "--turn",
        type=int,
        choices=sorted(shares.TURNS),
        help="leave out, of what is dealt out, what CI runs in its two other turns",
    )


def pytest_collection_modifyitems(config, items):
    """Deselects what is slow, or compares with transformers, unless `-m slow` or `-m hf` asks for
    it; what needs a GPU where there is none; and what is of another share or turn. Files of many
    long tests come first.
    """
    left_out = set()
    for asked in ("slow", "hf"):
        if asked not in config.option.markexpr:
            left_out |= {item for item in items if item.get_closest_marker(asked)}
    gpu = {item for item in items if item.get_closest_marker("gpu")}
    if gpu and not gpu_is_there():
        left_out |= gpu
    candidates = [item for item in items if item not in left_out]
    cases = shares.cases_of((item.nodeid, marks_of(item)) for item in candidates)
    share, turn = config.option.share, config.option.turn
    runs = [case.runs(share, turn) for case in cases]
    left_out |= {item for item, does in zip(candidates, runs, strict=True) if not does}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    long = Counter(item.path for item in items if is_long(item))
    items.sort(key=lambda item: (item.path.name not in HEAVIEST, -long[item.path]))


def marks_of(item) -> frozenset[str]:
    return frozenset(mark.name for mark in item.iter_markers())


def is_long(item) -> bool:
    return item.get_closest_marker("long") is not None


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of one file share what they have traced and compiled: for a file that runs the same
    settings many times, with no parts of its own but a loss. Ask for it by `usefixtures`.
    """
    from fuzz import programs  # imports jax

    with programs.shared():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Ends the collection where a name of a test is none: it would be left out without a word."""
    items = yield
    if name.startswith("test_") and not items and not inspect.ismodule(obj):
        raise collector.CollectError(f"{name} is no test but {obj!r}: see its decorators")
    return items


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects no garbage while the large libraries are imported, leaves them out of every later
    collection, and then collects seldom: tracing makes few cycles and many objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()
