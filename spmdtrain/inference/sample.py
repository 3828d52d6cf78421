"""Text, token ids and logits from trained weights, on any mesh without a pipeline.

Text is generated with a key-value cache in one compiled loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.given import as_flag, check_kind, shown
from spmdtrain.config.schema import SEEDS, RunConfig
from spmdtrain.inference.prompts import ended, ids_of, read_prompts, stops_of, texts_to_stop
from spmdtrain.inference.trained_run import OpenedRun, open_run
from spmdtrain.models.abstract import make_gather_layer, matmuls, needs_order
from spmdtrain.models.choose import MakeModel
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import empty_cache
from spmdtrain.models.logits import logit_shape, logits_of
from spmdtrain.models.sampling import choose
from spmdtrain.models.stack import Round
from spmdtrain.models.transformer import Block
from spmdtrain.parallel.axes import Rules
from spmdtrain.parallel.experts import make_experts
from spmdtrain.parallel.matmuls.tensor_matmul import (
    make_column_parallel,
    make_row_parallel,
    no_ring,
)
from spmdtrain.parallel.regions import make_constrain, make_local_map
from spmdtrain.parallel.vocabulary import make_lookup
from spmdtrain.train.given.arrays import check_params
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import are_finite

COLDEST = 1e-6  # the lowest temperature other than 0
MOST_TOKENS = 2**24  # that a text may have: its cache is allocated up front
HOTTEST = 1e30  # beyond this float32 overflows
LONGEST = 200  # tokens, if no number is given
END_OF_TEXT = "end-of-text"  # as a stop text: the token that ends a document


@dataclass(frozen=True)
class Choice:
    """The settings by which the next token is sampled; see `models.sampling.choose`."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        # Below COLDEST, float32 logits divided by it overflow.
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST
        ):
            given = shown(self.temperature).strip("'")
            what = f"--temperature {given} is not 0"
            raise ConfigError(f"{what}, nor a number from {COLDEST:g} to {HOTTEST:g}")
        if self.top_k is not None and (not _is_whole(self.top_k) or self.top_k < 1):
            raise ConfigError(f"--top-k {self.top_k} leaves no token, or is not a whole number")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"--top-p {self.top_p} is not above 0 and at most 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def generate(  # noqa: PLR0913 - one keyword for each thing that a caller may choose
    run: str | Path,
    prompt: str | Sequence[Any] | np.ndarray,
    length: int | None = None,
    *,
    step: int | None = None,
    choice: Choice = Choice(),  # noqa: B008 - it is frozen
    seed: int = 0,
    stop: Sequence[str] = (),
    overrides: Sequence[str] = (),
    make: MakeModel | str | None = None,
    ema: bool = False,
    parse_special: bool = False,
) -> str | list[str] | np.ndarray:
    """Returns `prompt` and at most `length` tokens after it, by the weights of `run`.

    These are its weights after `step` steps, by default of the newest intact checkpoint. A text
    gives a text, and a list of texts a list, made as one batch; token ids [time] or [batch, time]
    give ids. A list of messages, {"role": ..., "content": ...}, is written as in training; it gives
    only the answer, up to where the template closes it. Special tokens spelled in a text are read
    as text, unless `parse_special`.

    `length` defaults to the number of tokens that the model was made for, at most LONGEST. Beyond
    that number the model sees only the last tokens (with rotary positions: all). Text ends before
    the first of the texts in `stop`; END_OF_TEXT in `stop` stands for the token that ends a
    document. `overrides` may set mesh.* (default: one device), rules.* and model.attention. `make`
    is what the run was trained with: a class or its name, as in `model.make`. With `ema` the
    average of the weights is used, which a run with `optimizer.ema` has. Raises UserError.
    """
    choice, stop = checked_choice(choice), texts_to_stop(stop)
    parse_special = as_flag(parse_special, "parse_special")
    key = sampling_key(seed)
    check_length(length)
    opened = open_run(run, step=step, make=make, overrides=overrides, ema=ema)
    setup = opened.setup
    refuse_pipeline(setup.mesh)
    prompts = read_prompts(opened, prompt, parse_special)
    length = _length(setup.config, prompts.ids, length)
    end = _end_of_text(opened) if END_OF_TEXT in stop else None
    stops = stops_of(prompts, [text for text in stop if text != END_OF_TEXT], end)
    make_ids = make_generate(setup, length, choice, stops.ids)
    made = make_ids(opened.params, prompts.ids, key)
    if prompts.tokenizer is None:
        return np.stack(made).reshape(*np.shape(prompt)[:-1], -1)
    found = [
        ended(prompts, ids, len(before), stops)
        for ids, before in zip(made, prompts.ids, strict=True)
    ]
    return found[0] if prompts.is_one else found


def generate_ids(
    setup: Setup,
    params: dict[str, jax.Array],
    prompt: Sequence[int] | np.ndarray,
    length: int | None = None,
    *,
    choice: Choice = Choice(),  # noqa: B008 - it is frozen
    seed: int = 0,
) -> np.ndarray:
    """Generates token ids, like `generate`, with the parameters of a training state.

    Raises ConfigError if an argument cannot be used.
    """
    check_setup(setup)
    check_params(setup, params)
    choice, key = checked_choice(choice), sampling_key(seed)
    refuse_pipeline(setup.mesh)
    prompts = ids_of(prompt, setup.model.rows)
    length = _length(setup.config, prompts, length)
    make_ids = make_generate(setup, length, choice)
    made = make_ids(params, prompts, key)
    return np.stack(made).reshape(*np.shape(prompt)[:-1], -1)


def make_logits(setup: Setup) -> Callable[[dict[str, jax.Array], Any], jax.Array]:
    """Returns `logits(params, tokens [batch, time]) -> float32 [batch, time, vocab]`.

    Each token sees the earlier ones, as in training, or all if the model restores tokens; documents
    are not separated. Raises ConfigError if the mesh has a pipeline; `logits` raises it if the
    parameters or the tokens do not fit this setup.
    """
    check_setup(setup)
    refuse_pipeline(setup.mesh)
    rules = _whole_batch(setup.rules)
    compute = setup.config.precision.compute

    @jax.jit
    def logits(params, tokens_bt):
        positions = jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
        ctx = _context(rules, jnp.broadcast_to(positions, tokens_bt.shape))
        module = _bound(setup, params, rules)
        return _logits(setup.config, module, tokens_bt, ctx)[..., : setup.model.rows]

    def under_mesh(params, tokens):
        check_params(setup, params)
        if not isinstance(tokens, Tracer):  # a traced call has no concrete ids
            tokens = _checked_tokens(setup.config, tokens)
        with jax.set_mesh(setup.mesh), matmuls(compute):
            return logits(params, jnp.asarray(tokens))

    return under_mesh


def _checked_tokens(config: RunConfig, tokens: Any) -> np.ndarray:
    """Returns tokens [batch, time]; ConfigError if they are not ids, or too many for the model."""
    rows = np.stack(ids_of(tokens, config.vocab))
    if np.ndim(tokens) != 2:
        raise ConfigError(f"tokens of shape {np.shape(tokens)}", fix="tokens [batch, time]")
    if config.model.positions == "learned" and rows.shape[1] > config.model.max_length:
        raise ConfigError(
            f"{rows.shape[1]} tokens are more than the model has positions",
            asked=f"tokens of shape {rows.shape}",
            found=f"model.max_length={config.model.max_length}",
            fix=f"tokens[:, -{config.model.max_length}:]",
        )
    return rows


def make_generate(
    setup: Setup,
    length: int,
    choice: Choice,
    ends: Sequence[int] = (),
    *,
    shapes: Callable[[int, int], tuple[int, int]] = lambda start, room: (start, room),
) -> Callable[..., list[np.ndarray]]:
    """Returns `generate(params, prompts, key) -> ids`, each prompt followed by `length` tokens.

    The prompts are read in one pass up to the length of the shortest, and token by token from
    there. The loop ends once every text has reached one of the tokens `ends`; the ids after that
    token are meaningless. Weights stay sharded as the rules say; the few sequences are whole on
    every device.

    `shapes(length of the shortest prompt, tokens of the longest text)` returns how many tokens are
    read in one pass, no more than that, and how many there is room for, no fewer: a program is
    compiled for each pair. `generate` may be given another `length` each time.
    """
    refuse_corrupting(setup)
    config = setup.config
    rules = _whole_batch(setup.rules)
    compute = config.precision.compute

    @partial(jax.jit, static_argnums=5)
    def filled(params, prompts_bt, lengths_b, stop_at, key, start):
        """`prompts_bt` has room for the new tokens; each row holds `lengths_b` tokens so far."""
        module = _bound(setup, params, rules)
        predict = _cached if _has_cache(config, module, prompts_bt.shape[1]) else _windowed
        first, following = predict(config, module, rules, prompts_bt, start)

        def unfinished(carry):
            at, _, _, ended_b = carry
            return (at < stop_at) & ~ended_b.all()

        def next_token(carry):
            at, tokens_bt, (logits_bv, cache), ended_b = carry
            own_key = jax.random.fold_in(key, at)
            logits_bv = logits_bv[:, : setup.model.rows]  # the rest are padding
            chosen_b = choose(logits_bv, own_key, choice.temperature, choice.top_k, choice.top_p)
            is_given_b = at < lengths_b
            token_b = jnp.where(is_given_b, tokens_bt[:, at], chosen_b)
            tokens_bt = tokens_bt.at[:, at].set(token_b)
            for end in ends:
                ended_b |= ~is_given_b & (token_b == end)
            return at + 1, tokens_bt, following(tokens_bt, at, cache), ended_b

        nobody = jnp.zeros(prompts_bt.shape[0], bool)
        carry = (jnp.int32(start), prompts_bt, first, nobody)
        return jax.lax.while_loop(unfinished, next_token, carry)[1]

    def under_mesh(params, prompts, key, length=length) -> list[np.ndarray]:
        if not are_finite(params):
            what = "the weights have an entry that is not a number: no token is the likeliest"
            raise CheckpointError(what, fix="an earlier step: --step N")
        lengths_b = np.array([len(prompt) for prompt in prompts], np.int32)
        stop_at = int(lengths_b.max()) + length
        start, room = shapes(int(lengths_b.min()), stop_at)
        prompts_bt = np.zeros((len(prompts), room), np.int32)
        for row, prompt in zip(prompts_bt, prompts, strict=True):
            row[: len(prompt)] = prompt
        with jax.set_mesh(setup.mesh), matmuls(compute):
            made = filled(params, prompts_bt, lengths_b, stop_at, key, start)
        made = jax.device_get(made)
        return [row[: size + length] for row, size in zip(made, lengths_b, strict=True)]

    return under_mesh


# The two ways to predict the next token. Each returns the (logits [b, v], cache) after the first
# `start` tokens, and a function of (tokens [b, t], place, cache) that returns those after `place`.


def _cached(config: RunConfig, module: Any, rules: Rules, tokens_bt: jax.Array, start: int):
    """Predicts from the cached keys and values of earlier tokens."""
    compute = config.precision.compute
    batch, time = tokens_bt.shape
    empty = empty_cache(config.model, (batch, time), compute, make_constrain(rules))

    def extend(tokens_bt, cache):
        positions = cache.length + jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
        ctx = _context(rules, jnp.broadcast_to(positions, tokens_bt.shape))
        return module.extend(tokens_bt, ctx, cache)

    def following(tokens_bt, at, cache):
        return extend(jax.lax.dynamic_slice_in_dim(tokens_bt, at, 1, 1), cache)

    first = extend(tokens_bt[:, :start], empty)
    return first, following


def _windowed(config: RunConfig, module: Any, rules: Rules, tokens_bt: jax.Array, start: int):
    """Predicts by a fresh pass over the last tokens, within the model's positions.

    Works for any model in which no token sees a later one.
    """
    window = min(config.model.max_length, tokens_bt.shape[1])

    def following(tokens_bt, at, _):
        first = jnp.maximum(at + 1 - window, 0)
        seen_bt = jax.lax.dynamic_slice_in_dim(tokens_bt, first, window, 1)
        positions = jnp.arange(window, dtype=jnp.int32)
        ctx = _context(rules, jnp.broadcast_to(positions, seen_bt.shape))
        return _logits(config, module, seen_bt, ctx, at - first), None

    return following(tokens_bt, jnp.int32(start - 1), None), following


def _has_cache(config: RunConfig, module: Any, length: int) -> bool:
    """Returns True if the model can decode from cached keys and values, up to `length` tokens.

    False for a block that overrides `__call__` but not `extend`, which would compute something
    else, and for one with a part that would see the new token alone: an attention that does not
    declare `keeps_cache`, or an mlp that does not declare `any_order`.
    """
    if length > config.model.max_length and config.model.positions == "learned":
        return False
    layer = module.blocks.layer
    blocks = list(layer.block) if isinstance(layer, Round) else [layer]
    return hasattr(module, "extend") and all(
        _goes_with_its_call(type(block), "extend") and _has_parts(block) for block in blocks
    )


def _has_parts(block: Any) -> bool:
    """Returns True if the parts of a shipped block make of a new token what they make of all."""
    if isinstance(block, Block):
        keeps = _goes_with_its_call(type(block.attention), "keeps_cache")
        return keeps and not needs_order(block.mlp)
    return True


def _goes_with_its_call(owner: type, name: str) -> bool:
    """Returns True if a class has `name` from the class of its `__call__`, or from a newer one."""
    if not hasattr(owner, name):
        return False
    call = next(kind for kind in owner.__mro__ if "__call__" in vars(kind))
    found = next(kind for kind in owner.__mro__ if name in vars(kind))
    return issubclass(found, call)


def _logits(
    config: RunConfig, module: Any, tokens_bt: jax.Array, ctx: ForwardContext, at=None
) -> jax.Array:
    """Returns float32 logits [b, t, v], or [b, v] of the place `at`."""
    x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
    hidden_bte, table_ve = module.head(x_bte, ctx)
    if at is not None:
        hidden_bte = jax.lax.dynamic_slice_in_dim(hidden_bte, at, 1, 1)
    logits = logits_of(hidden_bte, table_ve, **logit_shape(config.model))
    return logits if at is None else logits[:, 0]


def _bound(setup: Setup, params: dict[str, jax.Array], rules: Rules) -> Any:
    """Returns the module of `params` in compute precision, however they are sharded."""
    used = {path: setup.padding.rest_to_use(path, x) for path, x in params.items()}
    values = setup.model.cast(used, setup.config.precision.compute)
    return setup.model.bind(values, make_gather_layer(rules))


def _whole_batch(rules: Rules) -> Rules:
    """Returns the rules with the few sequences whole on every device."""
    whole = {"batch": (), "time": (), "stream_time": ()}
    return replace(rules, activations={**rules.activations, **whole})


def _context(rules: Rules, positions_bt: jax.Array) -> ForwardContext:
    constrain = make_constrain(rules)
    return ForwardContext(
        positions_bt,
        constrain=constrain,
        column_matmul=make_column_parallel(constrain, no_ring),
        row_matmul=make_row_parallel(constrain, no_ring),
        experts=make_experts(rules),
        local_map=make_local_map(rules),
        lookup=make_lookup(rules),
        gather=make_gather_layer(rules),
    )


def _length(config: RunConfig, prompts: Sequence[np.ndarray], asked: int | None) -> int:
    """Returns the number of tokens to generate after each prompt. Raises ConfigError."""
    if asked is not None:
        return check_length(asked)
    room = config.model.max_length - max(len(prompt) for prompt in prompts)
    return min(room if room > 0 else LONGEST, LONGEST)


def check_length(asked: int | None) -> int:
    if asked is None:
        return LONGEST
    if not _is_whole(asked) or not 1 <= asked <= MOST_TOKENS:
        what = f"--length {shown(asked)} is not a whole number from 1 to {MOST_TOKENS}"
        raise ConfigError(what, fix=f"--length {LONGEST}")
    return int(asked)


def checked_choice(choice: Any) -> Choice:
    check_kind(choice, Choice, "choice", "st.Choice(temperature=0.8)")
    return choice


def sampling_key(seed: int) -> jax.Array:
    if not _is_whole(seed) or not 0 <= seed < SEEDS:
        raise ConfigError(f"--seed {seed!r} is not a whole number from 0 to {SEEDS - 1}")
    return jax.random.key(seed)


def _end_of_text(opened: OpenedRun) -> int:
    """Returns the id of the token that ended the documents in a run's training data."""
    if opened.end_of_text is None:
        what = "the run was trained without a token that ends a text"
        raise ConfigError(what, fix="--stop with a text")
    return opened.end_of_text


def refuse_pipeline(mesh: Mesh) -> None:
    if mesh.shape["pipeline"] > 1:
        raise ConfigError(
            f"mesh.pipeline={mesh.shape['pipeline']}: sampling has no pipeline",
            fix="--set mesh.tensor or mesh.fsdp",
        )


def refuse_corrupting(setup: Setup) -> None:
    """Raises ConfigError for a model that does not predict the next token."""
    if setup.model.corrupt is not None:
        name = type(setup.model.bind({})).__name__
        raise ConfigError(
            f"{name} restores tokens from all the others",
            asked="the tokens after a prompt",
            found=f"{name}.corrupt",
            fix="spmdtrain eval RUN, or make_logits in Python",
        )
