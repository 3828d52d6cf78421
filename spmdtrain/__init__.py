"""Trains language models with JAX on any mesh, in any combination of parallelisms.

These are data, FSDP, tensor, context, expert and pipeline parallelism.

One TOML file describes a run; `spmdtrain train` obeys it on one device or on thousands and gives
the same losses. In Python, `import spmdtrain as st`:

    config = st.load("configs/quickstart.toml", ["train.steps=20"])
    st.run(config, "runs/mine")            # all of it, or step by step:

    config, data = st.open_data(config)    # the corpus decides the vocabulary
    setup = st.shard(config)               # mesh, rules, model and state: shapes, no memory yet
    state = st.init_state(setup)           # fresh, or with the weights of train.init_from
    state = st.restore("runs/mine", setup) # or with its moments too, onto any mesh
    step = st.make_step(setup)             # step(state, batch) -> (state, metrics)

    st.weights("runs/mine")                # plain arrays by path
    st.generate("runs/mine", "def main(")  # text, or ids for ids
    st.evaluate("runs/mine")               # loss, perplexity, bits per byte
    st.estimate(config, 8, "h200")         # time and memory of a step, without the devices

`run` takes what a caller exchanges as keywords: `make` (the model), `optimizer`, `learning_rate`,
`loss`, `data`, `sinks` and `hooks`.

The rooms, lowest first: `config`, `processes`, `parallel` and `compiled`, `pipeline`, `models` and
`data`, `train`, `checkpoints` and `interop`, `inference`, `running`, `show`, `planner` and
`launch`, `lab` (what reads finished runs: replay, certify, diff, and so on), `cli`; imports only go
down. `__init__.pyi` lists the public names and their homes, also for type checkers. They are
imported when they are asked for, so that `spmdtrain --help` takes milliseconds.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
