"""Training by hand: the functions that `spmdtrain train` calls, in the order of a run.

    python examples/train_gpt.py [--steps 60]        (after `pip install -e .`)

No download, any CPU: the process pretends to have 8 devices. A small GPT reads the source of
Python's own library, first on one device, then on 2 x 2 x 2 (batch split, weights split, layers
split). The loss falls from about ln 256 = 5.5, and is the same on both meshes up to the last
float32 digits: a mesh decides where to compute, not what.
"""

import argparse
from collections.abc import Iterator

import jax

import spmdtrain as st
from spmdtrain.config import GPT, AdamW, MeshConfig, TrainConfig
from spmdtrain.data.batches import TrainStream, batch_ids, split
from spmdtrain.data.corpus import open_corpus


def losses(config: st.RunConfig, devices: list[jax.Device]) -> Iterator[float]:
    """Trains as `config` says and returns the loss of every step."""
    corpus = open_corpus(config.data, config.model.vocab, config.train.seed)
    train = config.train
    config = config.with_vocab(corpus.vocab)  # one embedding row per byte
    # Mesh, rules, model and state: shapes and shardings, no memory yet.
    setup = st.shard(config, devices=devices)
    state = st.init_state(setup)  # every leaf is created in its shards
    step = st.make_step(setup)
    tokens, _ = split(corpus, config.data.validation_fraction, train.sequence_length)
    stream = TrainStream(corpus, tokens, train.sequence_length, seed=train.seed, shuffle=True)
    for number in range(train.steps):
        ids = batch_ids(number, train.global_batch)
        batch = setup.to_devices(stream.samples, ids)
        state, metrics = step(state, batch)
        yield float(metrics["loss"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    if chosen.steps < 1:
        refused = f"--steps {chosen.steps} is not a whole number of at least 1"
        parser.exit(4, f"{parser.prog}: {refused}\n")
    st.simulate_devices(8)  # omit this line on 8 GPUs
    one_device = st.RunConfig(
        model=GPT(layers=2, embed=64, heads=4),
        train=TrainConfig(steps=chosen.steps, sequence_length=64),
        optimizer=AdamW(learning_rate=3e-3),
    )
    eight = one_device.model_copy(update={"mesh": MeshConfig(data=2, fsdp=2, tensor=2)})
    alone = losses(one_device, jax.devices()[:1])
    split_up = losses(eight, jax.devices()[:8])
    print("step  1 device    8 devices   relative difference")
    for number, (a, b) in enumerate(zip(alone, split_up, strict=True), 1):
        print(f"{number:4}  {a:.6f}    {b:.6f}    {abs(b - a) / a:.1e}", flush=True)
