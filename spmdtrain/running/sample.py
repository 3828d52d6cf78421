"""Text from a trained run: its newest weights, a key-value cache, one compiled loop, on any mesh."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.schema import MeshConfig, RunConfig
from spmdtrain.data.tokenizer import Tokenizer, from_spec
from spmdtrain.models.abstract import AbstractModel, build_model, cast, make_gather, matmuls
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import Cache
from spmdtrain.models.sampling import choose
from spmdtrain.parallel.axes import Rules, make_rules
from spmdtrain.parallel.mesh import build_mesh
from spmdtrain.parallel.regions import make_constrain, make_local_map
from spmdtrain.parallel.vocabulary import make_lookup
from spmdtrain.running.checkpoint import Checkpoints
from spmdtrain.train.setup import parameter_specs
from spmdtrain.train.state import abstract_state

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


def sample(run: Path, prompt: str, length: int | None, choice: Choice, seed: int, overrides: Sequence[str] = ()) -> str:
    """`prompt` and `length` tokens after it (None: as many as the model has positions for, at most LONGEST).
    `overrides` may set mesh.* (default: one device), rules.* and model.attention."""
    config, tokenizer = _read_run(run, overrides)
    devices = jax.devices()[: math.prod(size for size in config.mesh.sizes.values() if size > 0)]
    mesh = build_mesh(config.mesh, devices=None if -1 in config.mesh.sizes.values() else devices, where=config.origin)
    if mesh.shape["pipeline"] > 1:
        raise ConfigError(
            f"mesh.pipeline={mesh.shape['pipeline']}: sampling has no pipeline", fix="--set mesh.tensor or mesh.fsdp"
        )
    rules = make_rules(config.rules, mesh.shape)
    model = build_model(config)
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise ConfigError("--prompt is empty: there is nothing to go on from")
    room = config.max_length - len(ids)
    length = length or min(max(room, 1), LONGEST)
    if length > room:
        raise ConfigError(
            f"the model has {config.max_length} positions",
            asked=f"{len(ids)} tokens of prompt and --length {length}",
            fix=f"--length {room}" if room > 0 else "a shorter --prompt",
        )
    with contextlib.closing(Checkpoints(run, model, keep=None)) as checkpoints:
        newest = checkpoints.newest()
        if newest is None:
            raise CheckpointError(f"{run} holds no checkpoint", fix="training first: spmdtrain train CONFIG --run RUN")
        specs = parameter_specs(model, rules)
        abstract = abstract_state(config, model, mesh, specs).params
        params, _ = checkpoints.restore_params(newest, abstract)
    generate = make_generate(config, model, mesh, rules, length, choice)
    generated = generate(params, ids[None].astype(np.int32), jax.random.key(seed))
    return tokenizer.decode(np.concatenate([ids, jax.device_get(generated)[0]]))


def make_generate(
    config: RunConfig, model: AbstractModel, mesh: Mesh, rules: Rules, length: int, choice: Choice
) -> Callable[[dict[str, jax.Array], np.ndarray, jax.Array], jax.Array]:
    """`generate(params, prompt [b, t], key) -> ids [b, length]`, jitted. The prompt is read at once, then token by
    token. Weights stay split as the rules say; the few sequences are whole on every device."""
    whole = {"batch": (), "time": (), "stream_time": ()}
    rules = replace(rules, activations={**rules.activations, **whole})
    model_config = config.model
    dtype = config.precision.compute

    def context(positions_bt):
        return ForwardContext(
            positions_bt,
            constrain=make_constrain(rules),
            local_map=make_local_map(rules),
            lookup=make_lookup(rules),
            gather=make_gather(rules),
        )

    def generate(params, prompt_bt, key):
        module = model.bind(cast(params, dtype), make_gather(rules))
        batch, start = prompt_bt.shape
        shape = (model_config.layers, batch, start + length, model_config.key_value_heads, model_config.width_per_head)
        empty = make_constrain(rules)(jnp.zeros(shape, jnp.dtype(dtype)), None, "batch", None, "kv_heads", "head_dim")

        def extend(tokens_bt, cache):
            positions = cache.length + jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
            return module.extend(tokens_bt, context(jnp.broadcast_to(positions, tokens_bt.shape)), cache)

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


def _read_run(run: Path, overrides: Sequence[str]) -> tuple[RunConfig, Tokenizer]:
    """Mesh and attention are not the run's: they belong to the devices that it was trained on."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key != "model.attention" and not key.startswith(("mesh.", "rules.")):
            raise ConfigError(
                "a run is sampled with the settings it was trained with",
                asked=f"--set {override}",
                fix="--set of mesh.*, rules.* or model.attention",
            )
    try:
        saved = json.loads((run / "config.json").read_text())
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        cause = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{run} is not a run directory: {run / 'config.json'}: {cause}", fix="what training was given as --run"
        ) from None
    match saved:
        case {"config": {"model": {"vocab": int()}}, "origin": dict() as origin}:
            pass
        case _:
            raise CheckpointError(f"{run} is not a run directory: {run / 'config.json'} holds no resolved config")
    if saved.get("tokenizer") is None:
        raise CheckpointError(f"{run} was trained on tokens without a tokenizer: there is no text to sample")
    saved["config"]["mesh"] = MeshConfig().model_dump()
    saved["config"]["model"]["attention"] = "auto"
    dropped = ("mesh.", "model.attention")
    saved["origin"] = {key: str(where) for key, where in origin.items() if not key.startswith(dropped)}
    return from_resolved(saved, overrides), from_spec(saved["tokenizer"])
