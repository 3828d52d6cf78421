"""Text, token ids and logits from trained weights, on any mesh without a pipeline.

Text is made with a key-value cache in one compiled loop.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.schema import MeshConfig, RunConfig
from spmdtrain.data.tokenizer import Tokenizer, from_spec
from spmdtrain.models.abstract import (
    AbstractModel,
    MakeModel,
    build_model,
    cast,
    make_gather,
    matmuls,
)
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import Cache
from spmdtrain.models.sampling import choose
from spmdtrain.models.transformer import Transformer
from spmdtrain.parallel.axes import Rules, make_rules
from spmdtrain.parallel.mesh import build_mesh
from spmdtrain.parallel.regions import make_constrain, make_local_map
from spmdtrain.parallel.vocabulary import make_lookup
from spmdtrain.running.checkpoint import Checkpoints
from spmdtrain.running.model_code import check_model_code, model_code
from spmdtrain.running.restore import newest, read_document
from spmdtrain.train.setup import Setup, parameter_specs
from spmdtrain.train.state import abstract_params

LONGEST = 200  # tokens, where nobody asked for a number


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen; see `models.sampling.choose`."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ConfigError(f"--temperature {self.temperature} is not at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k} leaves no token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} is not above 0 and at most 1")


def generate(
    run: str | Path,
    prompt: str | Sequence[int] | np.ndarray,
    length: int | None = None,
    *,
    choice: Choice = Choice(),  # noqa: B008 - it is frozen
    seed: int = 0,
    overrides: Sequence[str] = (),
    make: MakeModel = Transformer,
) -> str | np.ndarray:
    """`prompt` and `length` tokens after it, by the newest weights of `run`.

    A prompt of text gives text, one of token ids [time] or [batch, time] gives ids. `length`
    defaults to as many tokens as the model has positions for, at most LONGEST. `overrides` may set
    mesh.* (default: one device), rules.* and model.attention; `make` is what the run was trained
    with. Raises UserError.
    """
    run = Path(run)
    config, spec = _read_run(run, overrides)
    mesh = _mesh_of(config)
    rules = make_rules(config.rules, mesh.shape)
    model = build_model(config, make)
    tokenizer = None
    if isinstance(prompt, str):
        tokenizer = _tokenizer(run, spec)
        prompt = tokenizer.encode(prompt)
    ids_bt = _as_batch(prompt)
    length = _length(config, ids_bt.shape[1], length)
    with contextlib.closing(Checkpoints(run, model, keep=None)) as checkpoints:
        specs = parameter_specs(model, rules)
        abstract = abstract_params(model, config.precision.params, mesh, specs)
        step = newest(checkpoints, run)
        params, meta = checkpoints.restore_params(step, abstract)
    now = model_code(make, model.bind({}))
    check_model_code(meta.get("model_code"), now, f"step {step} of {run}")
    make_ids = make_generate(config, model, mesh, rules, length, choice)
    new = jax.device_get(make_ids(params, ids_bt, jax.random.key(seed)))
    if tokenizer:
        return tokenizer.decode(np.concatenate([ids_bt[0], new[0]]))
    return np.concatenate([ids_bt, new], 1).reshape(*np.shape(prompt)[:-1], -1)


def generate_ids(
    setup: Setup,
    params: dict[str, jax.Array],
    prompt: Sequence[int] | np.ndarray,
    length: int | None = None,
    *,
    choice: Choice = Choice(),  # noqa: B008 - it is frozen
    seed: int = 0,
) -> np.ndarray:
    """`generate` for token ids, with the parameters of a training state at hand."""
    _refuse_pipeline(setup.mesh)
    ids_bt = _as_batch(prompt)
    length = _length(setup.config, ids_bt.shape[1], length)
    of_setup = (setup.config, setup.model, setup.mesh, setup.rules)
    make_ids = make_generate(*of_setup, length, choice)
    new = jax.device_get(make_ids(params, ids_bt, jax.random.key(seed)))
    return np.concatenate([ids_bt, new], 1).reshape(*np.shape(prompt)[:-1], -1)


def make_logits(setup: Setup) -> Callable[[dict[str, jax.Array], Any], jax.Array]:
    """`logits(params, tokens [batch, time]) -> float32 [batch, time, vocab]`, jitted, no dropout.

    Each token sees those before it, as in training; documents are not told apart. Raises
    ConfigError where the mesh has a pipeline.
    """
    _refuse_pipeline(setup.mesh)
    rules = _whole_batch(setup.rules)
    compute = setup.config.precision.compute

    @jax.jit
    def logits(params, tokens_bt):
        positions = jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
        ctx = _context(rules, jnp.broadcast_to(positions, tokens_bt.shape))
        module = setup.model.bind(cast(params, compute), make_gather(rules))
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        hidden_bte, table_ve = module.head(x_bte, ctx)
        return jnp.einsum("bte,ve->btv", hidden_bte, table_ve, preferred_element_type=jnp.float32)

    def under_mesh(params, tokens):
        with jax.set_mesh(setup.mesh), matmuls(compute):
            return logits(params, jnp.asarray(tokens))

    return under_mesh


def make_generate(
    config: RunConfig, model: AbstractModel, mesh: Mesh, rules: Rules, length: int, choice: Choice
) -> Callable[[dict[str, jax.Array], np.ndarray, jax.Array], jax.Array]:
    """`generate(params, prompt [b, t], key) -> ids [b, length]`, jitted.

    The prompt is read at once, then token by token. Weights stay split as the rules say; the few
    sequences are whole on every device.
    """
    rules = _whole_batch(rules)
    model_config = config.model
    dtype = config.precision.compute

    def generate(params, prompt_bt, key):
        module = model.bind(cast(params, dtype), make_gather(rules))
        if not hasattr(module, "extend"):
            raise ConfigError(
                f"{type(module).__name__} has no extend, so no text can be made with it",
                fix="def extend(self, tokens_bt, ctx, cache), as in models/transformer.py",
            )
        batch, start = prompt_bt.shape
        shape = (
            model_config.layers,
            batch,
            start + length,
            model_config.key_value_heads,
            model_config.width_per_head,
        )
        zeros = jnp.zeros(shape, jnp.dtype(dtype))
        empty = make_constrain(rules)(zeros, None, "batch", None, "kv_heads", "head_dim")

        def extend(tokens_bt, cache):
            positions = cache.length + jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
            ctx = _context(rules, jnp.broadcast_to(positions, tokens_bt.shape))
            return module.extend(tokens_bt, ctx, cache)

        def next_token(carry, key):
            logits, cache = carry
            token_b = choose(logits, key, choice.temperature, choice.top_k, choice.top_p)
            return extend(token_b[:, None], cache), token_b

        first = extend(prompt_bt, Cache(empty, empty, jnp.int32(0)))
        _, tokens = jax.lax.scan(next_token, first, jax.random.split(key, length))
        return tokens.T

    def under_mesh(*arguments):
        with jax.set_mesh(mesh), matmuls(config.precision.compute):
            return jax.jit(generate)(*arguments)

    return under_mesh


def _whole_batch(rules: Rules) -> Rules:
    """The rules of a few sequences that are whole on every device."""
    whole = {"batch": (), "time": (), "stream_time": ()}
    return replace(rules, activations={**rules.activations, **whole})


def _context(rules: Rules, positions_bt: jax.Array) -> ForwardContext:
    return ForwardContext(
        positions_bt,
        constrain=make_constrain(rules),
        local_map=make_local_map(rules),
        lookup=make_lookup(rules),
        gather=make_gather(rules),
    )


def _as_batch(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as int32 [batch, time]."""
    ids = np.asarray(ids)
    if not ids.size:
        raise ConfigError("--prompt is empty: there is nothing to go on from")
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(
            f"a prompt of shape {ids.shape} and dtype {ids.dtype}",
            fix="text, or integer ids [time] or [batch, time]",
        )
    return ids.reshape(-1, ids.shape[-1]).astype(np.int32)


def _length(config: RunConfig, prompt: int, asked: int | None) -> int:
    """How many tokens to make after a prompt of so many."""
    room = config.max_length - prompt
    length = asked or min(max(room, 1), LONGEST)
    if length > room:
        raise ConfigError(
            f"the model has {config.max_length} positions",
            asked=f"{prompt} tokens of prompt and --length {length}",
            fix=f"--length {room}" if room > 0 else "a shorter --prompt",
        )
    return length


def _mesh_of(config: RunConfig) -> Mesh:
    """The mesh to sample on: the first devices, as many as it asks for."""
    sizes = config.mesh.sizes.values()
    devices = None
    if -1 not in sizes:
        devices = jax.devices()[: math.prod(sizes)]
    mesh = build_mesh(config.mesh, devices=devices, where=config.origin)
    _refuse_pipeline(mesh)
    return mesh


def _refuse_pipeline(mesh: Mesh) -> None:
    if mesh.shape["pipeline"] > 1:
        raise ConfigError(
            f"mesh.pipeline={mesh.shape['pipeline']}: sampling has no pipeline",
            fix="--set mesh.tensor or mesh.fsdp",
        )


def _read_run(run: Path, overrides: Sequence[str]) -> tuple[RunConfig, dict | None]:
    """The run's configuration, and the specification of its tokenizer if it has one.

    Mesh and attention are not the run's: they belong to the devices that it was trained on.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key != "model.attention" and not key.startswith(("mesh.", "rules.")):
            raise ConfigError(
                "a run is sampled with the settings it was trained with",
                asked=f"--set {override}",
                fix="--set of mesh.*, rules.* or model.attention",
            )
    saved = read_document(run)
    saved["config"]["mesh"] = MeshConfig().model_dump()
    saved["config"]["model"]["attention"] = "auto"
    dropped = ("mesh.", "model.attention")
    saved["origin"] = {
        key: str(where) for key, where in saved["origin"].items() if not key.startswith(dropped)
    }
    return from_resolved(saved, overrides), saved.get("tokenizer")


def _tokenizer(run: Path, spec: dict | None) -> Tokenizer:
    if spec is None:
        raise CheckpointError(
            f"{run} was trained on tokens without a tokenizer: there is no text to sample"
        )
    return from_spec(spec)
