"""Checks the arrays that a caller passes to a step or a loss, on the host, at each call.

This happens before anything is traced or donated. A value that is itself traced, e.g. by
`jax.grad`, has a shape and a dtype to check but no numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

if TYPE_CHECKING:
    from spmdtrain.parallel.context.context_method import ContextMethod

BATCHES = "one of st.batches(setup, data, step=0, sample=0)"
STATES = "dataclasses.replace(state, params=...) of a state of init_state, restore or a step"
PARAMS = "state.params of init_state, restore or a step"


class Checked:
    """A jitted function whose arguments are first passed to `check`.

    Every other attribute, e.g. `lower`, is that of the function, which is `jitted`.
    """

    def __init__(self, jitted: Callable[..., Any], check: Callable[..., None]):
        self.jitted = jitted
        self._check = check

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self._check(*args, **keywords)
        return self.jitted(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["jitted"], name)


# The weights and the state


def check_params(setup: Setup, params: Any) -> None:
    """Raises ConfigError if `params` are not the weights of the setup: floats in any floating
    dtype, the integers of quantised weights in their own.
    """
    wanted: Mapping[str, Any] = setup.state.params  # abstract
    if not isinstance(params, Mapping):
        raise ConfigError(f"params={shown(params)} is not a dict of arrays", fix=PARAMS)
    for path, want in wanted.items():
        if path not in params:
            raise ConfigError(f"params has no {path!r}", fix=PARAMS)
        x = params[path]
        _check_array(f"params[{path!r}]", x, PARAMS)
        is_float = jnp.issubdtype(want.dtype, jnp.floating)  # else of a quantised weight
        kind = jnp.floating if is_float else want.dtype
        if x.shape != want.shape or not jnp.issubdtype(x.dtype, kind):
            raise _another(f"params[{path!r}]", x, want, PARAMS)
    for path in params:
        if path not in wanted:
            raise ConfigError(f"params has {path!r}, which the model does not have", fix=PARAMS)
    _check_devices(params, setup.mesh, "params", PARAMS)


def check_state(setup: Setup, state: Any) -> None:
    """Raises ConfigError if `state` does not fit the setup: another leaf, shape or dtype."""
    if not isinstance(state, TrainState):
        raise ConfigError(f"state is {type(state).__name__}, not a TrainState", fix=STATES)
    wanted = dict(jax.tree_util.tree_leaves_with_path(setup.state))
    by_path = dict(jax.tree_util.tree_leaves_with_path(state))
    for path, want in wanted.items():
        name = _name(path)
        if path not in by_path:
            raise ConfigError(f"the state has no {name}", fix=STATES)
        x = by_path[path]
        if not isinstance(x, int):  # the step may be one
            _check_array(f"{name} of the state", x, STATES)
        if jnp.shape(x) != want.shape or jnp.result_type(x) != want.dtype:
            raise _another(f"{name} of the state", x, want, STATES)
    for path in by_path:
        if path not in wanted:
            what = f"the state has {_name(path)}, which does not belong to this setup"
            raise ConfigError(what, fix=STATES)


def check_state_here(setup: Setup, state: Any) -> None:
    """Checks as `check_state` does, and raises ConfigError if the state is on other devices."""
    check_state(setup, state)
    _check_devices(state, setup.mesh, "state", STATES)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path).removeprefix(".")


def _check_array(name: str, x: Any, fix: str) -> None:
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise ConfigError(f"{name} is {type(x).__name__}, not an array", fix=fix)
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        raise ConfigError(
            f"{name} has been deleted: a step reuses the memory of the state that it is given",
            fix="the state that the step returned: state, metrics = step(state, batch)",
        )


def _another(name: str, x: Any, want: Any, fix: str) -> ConfigError:
    actual = f"{jnp.result_type(x)} {jnp.shape(x)}"
    return ConfigError(f"{name} is {actual}", asked=f"{want.dtype} {want.shape}", fix=fix)


def _check_devices(tree: Any, mesh: Mesh, name: str, fix: str) -> None:
    """Raises ConfigError if arrays were put on devices other than those of the mesh."""
    here = set(mesh.devices.flat)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.committed:
            continue
        devices = x.sharding.device_set
        if devices != here:
            raise ConfigError(
                f"{name}{jax.tree_util.keystr(path)} is not on the devices of the setup",
                asked=f"{len(here)} of the mesh",
                found=", ".join(sorted(map(str, devices))[:8]),
                fix=fix,
            )


# The batch


def check_batch(setup: Setup, batch: Any, *, training: bool) -> None:
    """Raises ConfigError if a caller's batch does not fit the setup.

    For training it must have the shape of the setup's batches; an evaluation takes others. Ids must
    be in the vocabulary, positions within the model's range, and each weight of a token a number. A
    target that does not count may be anything.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(f"a batch is a dict of arrays, not {type(batch).__name__}", fix=BATCHES)
    wanted = setup.batch
    model = setup.config.model
    has_noise = model.dropout > 0 or (model.experts is not None and model.experts.jitter > 0)
    reads_sample = setup.model.corrupt is not None or (training and has_noise)
    if not reads_sample:
        wanted.pop("sample")
    if not training:
        for name in ("source", *setup.batch_arrays):
            wanted.pop(name, None)
    for name, want in wanted.items():
        if name not in batch:
            names = ", ".join(map(str, batch)) or "nothing"
            raise ConfigError(f"the batch has no {name!r}", found=names, fix=BATCHES)
        _check_entry(name, batch[name], want, batch["tokens"], training=training)
    cut = jnp.shape(batch["tokens"])[:2]
    for name, x in batch.items():
        _check_array(f"batch[{name!r}]", x, BATCHES)
        if jnp.shape(x)[:2] != cut:
            actual = f"{jnp.result_type(x)} {jnp.shape(x)}"
            what = f"batch[{name!r}] is {actual}"
            raise ConfigError(what, asked=f"[{cut[0]}, {cut[1]}, ...] as the tokens", fix=BATCHES)
    _check_devices(batch, setup.mesh, "batch", BATCHES)
    for part in _parts(batch):
        _check_numbers(setup, part)
        if setup.context_method:
            _check_order(setup.context_method, part)


def _check_entry(
    name: str, x: Any, want: jax.ShapeDtypeStruct, tokens: Any, *, training: bool
) -> None:
    _check_array(f"batch[{name!r}]", x, BATCHES)
    kinds = jnp.integer if jnp.issubdtype(want.dtype, jnp.integer) else jnp.number
    right = jnp.issubdtype(x.dtype, kinds) or (kinds is jnp.number and x.dtype == jnp.bool_)
    right = right and not jnp.issubdtype(x.dtype, jnp.complexfloating)
    shape = want.shape if training else jnp.shape(tokens)[: len(want.shape)]
    if not right or len(shape) != len(want.shape) or x.shape != shape:
        raise ConfigError(
            f"batch[{name!r}] is {x.dtype} {x.shape}", asked=f"{want.dtype} {shape}", fix=BATCHES
        )


def _parts(batch: Mapping[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    """Yields the parts of the batch that are on this host, for the entries that have any."""
    known = {name: x for name, x in batch.items() if not isinstance(x, Tracer)}
    arrays = [x for x in known.values() if isinstance(x, jax.Array)]
    if all(x.is_fully_addressable for x in arrays):
        yield {name: np.asarray(x) for name, x in known.items()}
        return
    shards = {name: x.addressable_shards for name, x in known.items() if isinstance(x, jax.Array)}
    for local in zip(*shards.values(), strict=True):
        yield {name: np.asarray(shard.data) for name, shard in zip(shards, local, strict=True)}


def _check_numbers(setup: Setup, part: dict[str, np.ndarray]) -> None:
    config = setup.config
    mask = part.get("mask")
    if mask is not None and not (np.isfinite(mask) & (mask >= 0)).all():
        bad = mask[~(np.isfinite(mask) & (mask >= 0))].flat[0]
        raise ConfigError(
            f"batch['mask'] has {bad}, which is not a weight of a token", fix="0 or 1"
        )
    _check_range("tokens", part.get("tokens"), config.vocab)
    targets = part.get("targets")
    if targets is not None and mask is not None and mask.shape == targets.shape:
        targets = np.where(mask != 0, targets, 0)
    _check_range("targets", targets, config.vocab)
    learned = config.model.positions == "learned"
    _check_range("positions", part.get("positions"), config.model.max_length if learned else 2**31)
    _check_range("segment_ids", part.get("segment_ids"), 2**31)
    for name, (dtype, _) in setup.batch_arrays.items():
        if dtype == "int32":
            _check_range(name, part.get(name), config.vocab)
    if config.data.mix:
        _check_range("source", part.get("source"), len(config.data.mix))
    length = part["tokens"].shape[-1] if "tokens" in part else 0
    most = None if learned and "positions" in part else config.model.most_tokens
    if most is not None and length > most:
        name = "model.max_length" if learned else "model.indexer.kept"
        raise ConfigError(
            f"the batch has {length} tokens in a row, more than the model has positions",
            found=f"{name}={most}",
            fix=BATCHES,
        )


def _check_order(method: "ContextMethod", part: dict[str, np.ndarray]) -> None:
    """Raises ConfigError if a batch for ring attention is not in zigzag order.

    Undoing the zigzag must give consecutive positions, except where a document begins.
    """
    positions = part.get("positions")
    if positions is None or positions.shape[-1] % (2 * method.zigzag):
        return
    order = method.token_order(positions.shape[-1])
    if order is None:
        return
    back = np.argsort(order)
    positions = positions[..., back]
    follows = positions[..., 1:] == positions[..., :-1] + 1
    if "segment_ids" in part:
        ids = part["segment_ids"][..., back]
        follows |= ids[..., 1:] > ids[..., :-1]
    if not follows.all():
        raise ConfigError(
            "the batch is in the order of the data, and attention by a ring needs zigzag order",
            fix=f"{BATCHES}, or --set model.context_attention=gather",
        )


def _check_range(name: str, ids: np.ndarray | None, stop: int) -> None:
    """Raises ConfigError if one of the ids is not from 0 to stop - 1."""
    if ids is None or not ids.size or (ids.min() >= 0 and ids.max() < stop):
        return
    bad = ids[(ids < 0) | (ids >= stop)].flat[0]
    raise ConfigError(f"batch[{name!r}] has {bad}", asked=f"0 to {stop - 1}", fix=BATCHES)
