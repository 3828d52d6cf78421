"""Writes what a teacher says of the training tokens of a run, once for many students.

What a teacher says depends on where its windows begin: see saved_logits/windows.py.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.arguments import as_whole
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.batches import batch_ids
from spmdtrain.data.saved_logits.logits_writer import LogitsWriter
from spmdtrain.data.saved_logits.manifest import VERSION, Manifest, bytes_of_token
from spmdtrain.data.saved_logits.taught_windows import passes
from spmdtrain.data.source import CorpusData, open_data
from spmdtrain.data.tokenizers.tokenizer import tokenizer_fingerprint
from spmdtrain.models.abstract import matmuls
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.running.start.sharding import shard_with_weights
from spmdtrain.train.distillation.run_teacher import Teacher, teacher_of
from spmdtrain.train.distillation.saved import make_likeliest
from spmdtrain.train.setup import Setup

LINES = 10  # of progress


def write_logits(
    config: RunConfig,
    out: str | Path,
    *,
    top: int = 32,
    devices: Sequence[jax.Device] | None = None,
) -> Manifest:
    """Writes the folder `out`, which `distill.logits` then names, and returns what it holds.

    `config` is that of a student with `distill.teacher`: of each of its training tokens the `top`
    likeliest next ones are saved, at `distill.temperature`. Prints the size first and then
    progress, to standard error. All processes call it, and process 0 writes. Raises UserError.
    """
    folder = Path(os.path.expanduser(out))
    config, data = open_data(config)
    if not isinstance(data, CorpusData):
        raise ConfigError(
            "logits are saved by the place of a token in one corpus",
            found=data.describe(config),
            fix="data.corpus with data.path, without data.mix",
        )
    top = as_whole(top, "top", 1, config.vocab)
    setup = shard_with_weights(config, None, devices, data.tokenizer)
    teacher = teacher_of(setup)
    if teacher is None or config.distill.teacher is None:
        raise ConfigError("the config names no teacher", fix="--set distill.teacher=RUN")
    size = data.train.size * bytes_of_token(top, config.vocab)
    if jax.process_index() == 0:
        costs = f"{data.train.size:,} tokens x {bytes_of_token(top, config.vocab)} bytes"
        print(f"{folder}: {costs} = {size / 1e6:,.3f} MB", file=sys.stderr, flush=True)
    params = teacher.opened.read()
    manifest = Manifest(
        version=VERSION,
        tokens=data.train.stop,
        top=top,
        temperature=float(config.distill.temperature or 1),
        vocab=config.vocab,
        corpus=data.fingerprint,
        tokenizer=tokenizer_fingerprint(data.tokenizer),
        sequence_length=config.train.sequence_length,
        packing=config.data.packing,
        teacher=config.distill.teacher,
        weights=teacher.opened.fingerprint(),
        ids="",
        logs="",
    )
    records = _records(data, config, teacher, params, manifest)
    if jax.process_index():
        for _ in records:
            pass
        return manifest
    with LogitsWriter(folder, manifest) as writer:
        for start, ids, logs in records:
            writer.write(start, ids, logs)
        return writer.finish()


def _records(
    data: CorpusData,
    config: RunConfig,
    teacher: Teacher,
    params: dict[str, jax.Array],
    manifest: Manifest,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (first token, ids [n, top], logs [n, top + 1]) of stretches of tokens."""
    setup = teacher.setup
    length = config.train.sequence_length
    back = np.argsort(zigzag_order(length, setup.zigzag))
    find = _compiled(setup, manifest)
    size = setup.config.train.global_batch
    read = [*passes(data.corpus, data.train, config)]
    batches = [
        (reading, at) for reading in read for at in range(-(-reading.windows.windows // size))
    ]
    with jax.set_mesh(setup.mesh), matmuls(setup.config.precision.compute):
        for done, (reading, at) in enumerate(batches, 1):
            numbers = batch_ids(at, size)
            batch = setup.to_devices(reading.windows.samples, numbers)
            likeliest = jax.device_get(find(params, batch))
            ids, logs = (x.reshape(size, length, -1)[:, back] for x in likeliest)
            for row, window in enumerate(numbers.tolist()):
                for place, start, inputs in reading.saved(window):
                    here = slice(place, place + inputs)
                    yield start, ids[row, here], logs[row, here]
            _say(done, len(batches))


def _compiled(setup: Setup, manifest: Manifest) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns `find(params, batch)`: ids and float16 log-probabilities, whole on every device."""
    likeliest = make_likeliest(setup, manifest.top, manifest.temperature)

    def find(params, batch):
        ids, logs = likeliest(params, batch)
        return ids, logs.astype(jnp.float16)

    everywhere = jax.sharding.NamedSharding(setup.mesh, jax.sharding.PartitionSpec())
    return jax.jit(find, out_shardings=everywhere)


def _say(done: int, batches: int) -> None:
    """Prints about LINES lines in total."""
    if jax.process_index() == 0 and done * LINES // batches > (done - 1) * LINES // batches:
        print(f"{100 * done // batches} %", file=sys.stderr, flush=True)
