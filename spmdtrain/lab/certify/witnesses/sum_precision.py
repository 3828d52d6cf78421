"""Checks whether gradients are summed over devices in the configured precision.

This is read off the program that XLA's partitioner emits, before the CPU backend widens narrow
types: no comparison of results on a CPU could find it.
"""

import tempfile
from pathlib import Path

import jax

from spmdtrain.compiled import hlo
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.source import open_data
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.witnesses.resume import with_settings
from spmdtrain.lab.certify.witnesses.witness import Witness
from spmdtrain.parallel.axes import BATCH_AXES
from spmdtrain.train.setup import Setup
from spmdtrain.train.step import make_step

SUMS = ("all-reduce", "reduce-scatter")
NARROW = {"bf16", "f16"}


def narrow_sums(small: RunConfig, layout: Layout, own: Own) -> Witness:
    """Checks that each sum over axes of the batch is as wide as `precision.accumulate`.

    `small` is the run on one device, in its own precision.
    """
    name = f"gradients cross devices in {small.precision.accumulate} ({layout.name})"
    if small.precision.accumulate != "float32":
        return Witness(name, None, "16 bits are asked for")
    config = open_data(with_settings(small, layout.overrides))[0]
    setup = own.shard(config, jax.devices()[: layout.devices])
    sums = [
        instruction
        for instruction in hlo.instructions(partitioned_text(setup), dict(setup.mesh.shape))
        if instruction.kind in SUMS and set(instruction.axis.split("+")) & set(BATCH_AXES)
    ]
    if not sums:
        return Witness(name, None, "no axis of the batch is split")
    narrow = [
        instruction.name for instruction in sums if NARROW & instruction.bytes_by_dtype.keys()
    ]
    count = f"{len(narrow)} of {len(sums)} sums have 16 bits"
    return Witness(name, not narrow, f"{count}: {', '.join(narrow[:3])}" if narrow else count)


def partitioned_text(setup: Setup) -> str:
    """Returns the text of the step as XLA's partitioner emits it, compiled without a cache."""
    with tempfile.TemporaryDirectory() as directory:
        dump = {"xla_dump_to": directory, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        make_step(setup).lower(setup.state, setup.batch).compile(compiler_options=dump)
        dumped = list(Path(directory).glob("*after_spmd-partitioning*.txt"))
        assert dumped, "nothing was compiled: the step lay in the compilation cache"
        return dumped[0].read_text(encoding="utf-8")
