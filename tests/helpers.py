"""What tests of training share: a tiny run, and training it on a mesh as the loop does, without its
files.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdtrain.config import RunConfig, from_resolved, resolved
from spmdtrain.data.batches import ReadAhead
from spmdtrain.data.source import open_data
from spmdtrain.parallel.axes import AXES
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.device_batches import batches
from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import make_gradients

TINY = {
    "model": {"name": "gpt", "layers": 2, "embed": 32, "heads": 4, "vocab": 64},
    "train": {"steps": 20, "global_batch": 16, "sequence_length": 16},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2, "warmup": 2, "weight_decay": 0.1},
    "data": {"corpus": "synthetic"},
}


def tiny(*overrides: str) -> RunConfig:
    """The tiny run with `a.b=c` strings on top, as `--set` takes them."""
    return from_resolved(
        {"config": TINY, "origin": {}} | {"origin": resolved(RunConfig())["origin"]}, overrides
    )


@cache
def described_run(*overrides: str) -> Path:
    """A directory that describes the tiny run with these settings, as a run does, and no more."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(resolved(tiny(*overrides))))
    return folder


# One mesh of each way to the gradients, beside the one device that answers for both.
MESHES = {
    "one device": (),
    "data 2 fsdp 2 tensor 2": (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "train.microbatch=1",
    ),
    "pipeline 2 context 2 data 2": (
        "mesh.pipeline=2",
        "mesh.context=2",
        "mesh.data=2",
        "train.microbatch=2",
    ),
}
SPLIT = [mesh for mesh in MESHES if mesh != "one device"]

# Every kind of mesh on which a type of weight must compute what it does on one device.
MESHES_OF_WEIGHTS = {
    "data, fsdp, tensor, zero": (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "train.microbatch=1",
        "train.zero=1",
    ),
    "collective matmuls": (
        "mesh.context=2",
        "mesh.tensor=2",
        "mesh.collective_matmul=true",
        "rules.activations.stream_time=context,tensor",
    ),
    "pipeline": ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1"),
    "zero bubble": (
        "mesh.pipeline=2",
        "mesh.context=2",
        "pipeline.schedule=zero_bubble",
        "train.microbatch=2",
    ),
    "expert, context": ("mesh.expert=2", "mesh.context=2", "train.microbatch=2"),
}


# XLA_FLAGS of these tests for a program that says itself how many devices it has. Without them it
# would compile for twice as long and more.
CHEAP_FLAGS = " ".join(
    flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag
)

MESH_SIZES = tuple(f"mesh.{axis}=" for axis in AXES)


def mesh_of(overrides: Sequence[str]) -> int:
    """How many devices the `mesh.axis=n` strings ask for."""
    return int(
        np.prod(
            [int(text.partition("=")[2]) for text in overrides if text.startswith(MESH_SIZES)],
            initial=1,
        )
    )


def prepared(*overrides: str) -> Setup:
    return shard(tiny(*overrides), devices=jax.devices()[: mesh_of(overrides)])


def batches_of(setup: Setup) -> ReadAhead:
    """The batches of a run from its first step on; use it in a `with`."""
    config, data = open_data(setup.config)
    assert config.model.vocab == setup.config.model.vocab
    return batches(setup, data, 0, 0)


@cache
def trained(
    *overrides: str, steps: int = 20
) -> tuple[np.ndarray, TrainState, list[dict[str, Any]]]:
    """(losses, final state, metrics) of `steps` steps from the start."""
    setup = prepared(*overrides)
    state = init_state(setup)
    metrics = []
    step = compiled_step(*overrides)
    with batches_of(setup) as ahead:
        for _ in range(steps):
            state, out = step(state, next(ahead))
            metrics.append(jax.device_get(out))
    return np.array([float(out["loss"]) for out in metrics]), state, metrics


@cache
def compiled_step(*overrides: str) -> jax.stages.Compiled:
    """The step's executable, which several tests run or read; nothing is allocated."""
    return lower_step(prepared(*overrides)).compile()


def partitioned_text(*overrides: str) -> str:
    """The step as XLA's SPMD partitioner leaves it, before the CPU backend widens what is
    narrow.
    """
    with tempfile.TemporaryDirectory() as directory:
        dump = {"xla_dump_to": directory, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        lower_step(prepared(*overrides)).compile(compiler_options=dump)
        dumped = list(Path(directory).glob("*after_spmd-partitioning*.txt"))
        assert dumped, "nothing was compiled: the step lay in the compilation cache"
        return dumped[0].read_text()


def assert_same_bits(got: Any, want: Any) -> None:
    """Every leaf of two states equal to the last bit."""
    got, want = jax.tree_util.tree_leaves_with_path(got), jax.tree_util.tree_leaves_with_path(want)
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, ours), (_, theirs) in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs)), jax.tree_util.keystr(path)


def pipeline(
    stages: int, axes: tuple[str, ...], schedule: str, chunks: int, turns: int, remat: str
) -> tuple[str, ...]:
    """Settings of a pipeline with other axes of 2 beside it; 32 sequences in microbatches of
    `turns` to a stage.
    """
    shards = 2 ** len([axis for axis in axes if axis != "tensor"])
    return (
        *(f"mesh.{axis}=2" for axis in axes),
        f"mesh.pipeline={stages}",
        f"pipeline.schedule={schedule}",
        f"pipeline.chunks={chunks}",
        "train.global_batch=32",
        f"train.microbatch={32 // (turns * stages * shards)}",
        f"train.remat={remat}",
    )


def pipeline_name(case: tuple) -> str:
    """Of a test: the arguments of `pipeline`, or settings."""
    if isinstance(case[0], str):
        return " ".join(setting.partition(".")[2] for setting in case)
    stages, axes, schedule, chunks, turns, remat = case
    return f"p{stages} {' '.join(axes)} {schedule} v{chunks} m{turns}p {remat}"


@cache
def initial_weights(*numbers: str) -> dict[str, np.ndarray]:
    """The parameters at step 0 as one device makes them, layers in order."""
    return jax.device_get(init_state(prepared(*numbers)).params)


@cache
def gradients(
    numbers: tuple[str, ...], placement: tuple[str, ...] = ()
) -> tuple[float, dict[str, np.ndarray]]:
    """(mean loss, gradients in the order of the layers) of the first batch, from the weights of one
    device.

    `numbers`: the settings that change them; `placement`: those that must not.
    """
    setup = prepared(*numbers, *placement)
    find = jax.jit(make_gradients(setup))
    step = jax.device_put(np.int32(0), setup.state.step.sharding)
    with batches_of(setup) as ahead:
        params = placed_arrays(setup, initial_weights(*numbers))
        found, sums = jax.device_get(find(params, step, next(ahead)))
    return float(sums["loss"] / sums["tokens"]), plain_arrays(setup, found)


def assert_gradients_of_one_device(
    numbers: tuple[str, ...], placement: tuple[str, ...], tolerance: float
) -> None:
    """Loss, and every gradient relative to the largest of its tensor."""
    smallest = (
        "model.embed=16",
        "model.heads=2",
        "model.vocab=32",
        "train.sequence_length=8",
        "train.global_batch=32",
    )
    got_loss, got = gradients((*smallest, *numbers), placement)
    want_loss, want = gradients((*smallest, *numbers))
    assert abs(got_loss - want_loss) <= tolerance * want_loss
    assert got.keys() == want.keys()
    for path in want:
        assert got[path].shape == want[path].shape
        worst = np.max(np.abs(got[path] - want[path])) / np.max(np.abs(want[path]))
        assert worst <= tolerance, f"{path}: {worst}"
