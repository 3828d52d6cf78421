"""Train language models with JAX on any mesh: data, FSDP, tensor, context, expert and pipeline parallelism.

One TOML file describes a run; `spmdtrain train` obeys it on one device or on thousands and gives the same losses. The
rooms, lowest first: `config`, `parallel`, `models` and `data`, `train`, `cli`; imports only go down.
"""

__version__ = "0.1.0"
