"""Train language models with JAX on any mesh: data, FSDP, tensor, context, expert and pipeline
parallelism.

One TOML file describes a run; `spmdtrain train` obeys it on one device or on thousands and gives
the same losses. In Python, `import spmdtrain as st`:

    config = st.load("configs/quickstart.toml", ["train.steps=20"])
    st.run(config, "runs/mine")            # all of it, or step by step:

    config, data = st.open_data(config)    # the corpus decides the vocabulary
    setup = st.shard(config)               # mesh, rules, model and state: shapes, no memory yet
    state = st.init_state(setup)           # or st.restore("runs/mine", setup), onto any mesh
    step = st.make_step(setup)             # step(state, batch) -> (state, metrics)

    st.weights("runs/mine")                # plain arrays by path
    st.generate("runs/mine", "def main(")  # text, or ids for ids
    st.evaluate("runs/mine")               # loss, perplexity, bits per byte
    st.estimate(config, 8, "h200")         # time and memory of a step, without the devices

`run` takes what a caller exchanges as keywords: `make` (the model), `optimizer`, `schedule`,
`loss`, `data`, `sinks` and `hooks`.

The rooms, lowest first: `config`, `parallel`, `models` and `data`, `train`, `running` and
`planner`, `cli`; imports only go down. The names below are imported when they are asked for, so
that `spmdtrain --help` takes milliseconds.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that has it.
_HOMES = {
    "load": "config",
    "RunConfig": "config",
    "UserError": "config",
    "simulate_devices": "parallel.processes",
    "set_xla_flags": "parallel.xla_flags",
    "Buffer": "models.buffer",
    "ForwardContext": "models.context",
    "Stack": "models.stack",
    "Transformer": "models.transformer",
    "Setup": "train.setup",
    "shard": "train.setup",
    "init_state": "train.setup",
    "TrainState": "train.state",
    "Rule": "train.optimizers",
    "make_optimizer": "train.shipped_optimizers",
    "make_step": "train.step",
    "make_eval_step": "train.step",
    "run_config": "running.restore",
    "restore": "running.restore",
    "weights": "running.restore",
    "generate": "running.sample",
    "generate_ids": "running.sample",
    "make_logits": "running.sample",
    "open_run": "running.opened",
    "OpenedRun": "running.opened",
    "evaluate": "running.evaluate",
    "Choice": "running.sample",
    "estimate": "planner.estimate",
    "plan": "planner.plan",
    "run": "running.loop",
    "Outcome": "running.loop",
    "open_data": "data.source",
    "Source": "data.source",
    "batches": "running.loop",
    "make_evaluate": "running.loop",
}
# A checker reads nothing but literals here.
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spmdtrain' has no attribute {name!r}")
    return getattr(import_module(f"spmdtrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
