"""Runs a caller's transformations of more than one tensor, such as clipping to the global norm.

A rule sees one layer's tensor (optimizers.py). A transformation that looks at several tensors, or
draws numbers, would not do there what its author intended: each tensor would have its own norm, and
all layers the same noise. `needs_whole_tree` finds it by a trial on small tensors, and `WholeTree`
gives it all tensors at once.

The state of a `WholeTree` is stored like that of any rule: by parameter, with the dims of the stack
first. What the transformation keeps once, a counter or a key, is stored for each layer of each
parameter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.named_code import of_own_code
from spmdtrain.models.abstract import Parameter, over_stack
from spmdtrain.train.updates.crossing import crosses

Tensors = Mapping[str, jax.Array]  # by dotted parameter path, layers stacked


@dataclass(frozen=True, eq=False)
class WholeTree:
    """One transformation of the tensors of several parameters.

    It gets {path: tensor}, and if `by_layer` is true {path: (tensor of each layer)} for the
    parameters that have layers. `stacked` is the number of dims of each that stack layers, and
    experts of layers.
    """

    transformation: optax.GradientTransformation
    stacked: Mapping[str, int]
    by_layer: bool

    def init(self, values: Tensors) -> dict[str, Any]:
        """Returns the state before the first step, by path."""
        return self._to_rest(self.transformation.init(self.as_input(values)), values)

    def update(
        self, gradients: Tensors, state: Mapping[str, Any], values: Tensors
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Returns (updates, new state), by path."""
        params = self.as_input(values)
        whole = self._from_rest(state, jax.eval_shape(self.transformation.init, params))
        new_updates: Any
        new_updates, new = self.transformation.update(self.as_input(gradients), whole, params)
        updates = {
            path: self._joined(path, new_updates[path], values[path]) for path in self.stacked
        }
        return updates, self._to_rest(new, values)

    def trial_update(self, parameters: Mapping[str, Parameter]) -> tuple[jax.Array, jax.Array]:
        """Returns (update, gradient) of all small tensors as vectors, after a step of ones."""
        ones = {path: jnp.ones(_small(parameter)) for path, parameter in parameters.items()}
        updates, _ = self.update(ones, self.init(ones), ones)
        joined = [jnp.concatenate([x[path].ravel() for path in ones]) for x in (updates, ones)]
        return joined[0], joined[1]

    def as_input(self, tensors: Tensors) -> dict[str, Any]:
        """Returns the tensors in the form that the transformation gets."""
        return {path: self._parted(path, tensors[path]) for path in self.stacked}

    def _parted(self, path: str, x: jax.Array) -> Any:
        stacked = self.stacked[path]
        if not self.by_layer or not stacked:
            return x
        return tuple(x.reshape(-1, *x.shape[stacked:]))

    def _joined(self, path: str, parts: Any, like: jax.Array) -> Any:
        """Reverses `_parted`, for a tensor or a state of each layer of `like`."""
        if type(parts) is not tuple or not self.by_layer:  # a named one is a state
            return parts
        stack = like.shape[: self.stacked[path]]
        return jax.tree.map(lambda *xs: jnp.stack(xs).reshape(stack + xs[0].shape), *parts)

    def _of_tensors(self, node: Any) -> bool:
        """Returns True for a part of the state that has an entry for each tensor."""
        return isinstance(node, dict) and node.keys() == self.stacked.keys()

    def _to_rest(self, whole: Any, values: Tensors) -> dict[str, Any]:
        parts, structure = jax.tree.flatten(whole, is_leaf=self._of_tensors)

        def rest(path: str, part: Any) -> Any:
            if self._of_tensors(part):
                return self._joined(path, part[path], values[path])
            if _is_key(part):
                part = jax.random.key_data(part)
            stack = values[path].shape[: self.stacked[path]]
            return jnp.broadcast_to(part, stack + jnp.shape(part))

        return {
            path: structure.unflatten([rest(path, part) for part in parts]) for path in self.stacked
        }

    def _from_rest(self, state: Mapping[str, Any], abstract: Any) -> Any:
        """Reverses `_to_rest`; `abstract` is the whole state in shapes."""
        parts, structure = jax.tree.flatten(abstract, is_leaf=self._of_tensors)
        resting = {path: structure.flatten_up_to(state[path]) for path in self.stacked}
        first = next(iter(self.stacked))

        def whole(at: int, part: Any) -> Any:
            if self._of_tensors(part):
                return {
                    path: self._split_layers(path, resting[path][at], part[path])
                    for path in self.stacked
                }
            once = resting[first][at][(0,) * self.stacked[first]]
            if _is_key(part):
                return jax.random.wrap_key_data(once, impl=_kind_of_key(part.dtype))
            return once

        return structure.unflatten([whole(at, part) for at, part in enumerate(parts)])

    def _split_layers(self, path: str, entry: Any, like: Any) -> Any:
        """Reverses `_joined`; `like` is the entry in the whole state."""
        if type(like) is not tuple or not self.by_layer:
            return entry
        parted = jax.tree.map(partial(self._parted, path), entry)
        return tuple(
            jax.tree.map(lambda _, parts, at=at: parts[at], entry, parted)
            for at in range(len(like))
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _kind_of_key(dtype: Any) -> str:
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    return next(kind for kind in kinds if jax.random.key(0, impl=kind).dtype == dtype)


# The trial


QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
SCALES = (1.0, 1e12, 1e-6, 1.0)  # of the gradients of each step


def needs_whole_tree(
    transformation: optax.GradientTransformation, parameters: Mapping[str, Parameter]
) -> WholeTree | None:
    """Returns how these parameters share the transformation; None if each is updated alone.

    Raises ConfigError if it cannot update them at all.
    """
    stacked = {path: parameter.apart for path, parameter in parameters.items()}
    whole = WholeTree(transformation, stacked, by_layer=True)
    trial = partial(_trial, parameters)
    alone = _result_or_error(lambda: trial(*_one_by_one(transformation, stacked)))
    together = _result_or_error(lambda: trial(whole.init, whole.update))
    if isinstance(alone, Exception) and isinstance(together, Exception):
        if (named := of_own_code(together)) is not None:
            raise named from together
        raise ConfigError(
            f"optimizer= cannot update all parameters: {type(together).__name__}: "
            f"{' '.join(str(together).split()):.200}",
            fix="a transformation that needs only the gradient, its state and the parameters",
        )
    if isinstance(together, Exception):
        # It was written for one array: layers that share a key would have the same noise.
        if _draws(transformation):
            raise ConfigError(
                "optimizer= draws random numbers, the same for all tensors of a shape",
                fix="optax.add_noise, or one that takes a tree",
            )
        return None
    if not isinstance(alone, Exception) and _equal(alone, together):
        ones = {path: jnp.ones(_small(parameter)) for path, parameter in parameters.items()}
        return whole if crosses(transformation, whole.as_input(ones)) else None
    stacks = WholeTree(transformation, stacked, by_layer=False)
    at_once = _result_or_error(lambda: trial(stacks.init, stacks.update))
    if isinstance(at_once, Exception) or not _equal(at_once, together):
        return whole
    return stacks if _same_state_shapes(stacks, whole, parameters) else whole


def _result_or_error(run: Callable[[], Any]) -> Any:
    """Returns the result of `run`, or the error that it raised."""
    try:
        return run()
    except Exception as error:  # the code is the caller's and may raise anything
        return error


def _one_by_one(
    transformation: optax.GradientTransformation, stacked: Mapping[str, int]
) -> tuple[Callable, Callable]:
    """Returns (init, update) that give the transformation each layer's tensor alone."""

    def init(values: Tensors) -> dict[str, Any]:
        return {
            path: over_stack(transformation.init, stacked[path])(x) for path, x in values.items()
        }

    def update(gradients: Tensors, state: Mapping[str, Any], values: Tensors) -> Any:
        results = {
            path: over_stack(transformation.update, stacked[path])(gradients[path], state[path], x)
            for path, x in values.items()
        }
        updates = {path: update for path, (update, _) in results.items()}
        return updates, {path: new for path, (_, new) in results.items()}

    return init, update


def _trial(parameters: Mapping[str, Parameter], init: Callable, update: Callable) -> list[Any]:
    """Returns updates and states of a few steps on small tensors, by path.

    The gradients differ in size in each tensor, layer and step, from tiny to huge, so that limits
    and averages take effect. In the last step one layer of the last tensor has a NaN.
    """
    draw = np.random.default_rng(0)
    shapes = {path: _small(parameter) for path, parameter in parameters.items()}

    def tensors(scale: float) -> dict[str, jax.Array]:
        sizes = {path: scale * (1 + at) for at, path in enumerate(shapes)}
        drawn = {path: draw.normal(size=shape) * sizes[path] for path, shape in shapes.items()}
        return {path: jnp.asarray(x, jnp.float32) for path, x in drawn.items()}

    values = tensors(1.0)
    state = init(values)
    if len(values) > 1:
        update = jax.jit(update).lower(values, state, values).compile(QUICKLY)
    trajectory = []
    for step, scale in enumerate(SCALES):
        gradients = tensors(scale)
        if step == len(SCALES) - 1:
            last = list(shapes)[-1]
            gradients[last] = gradients[last].at[(0,) * len(shapes[last])].set(jnp.nan)
        updates, state = update(gradients, state, values)
        _check_shapes(updates, values)
        trajectory.append((updates, state))
    return trajectory


def _check_shapes(updates: Tensors, values: Tensors) -> None:
    for path, x in values.items():
        if jnp.shape(updates[path]) != x.shape:
            raise ValueError(
                f"for {path} of shape {x.shape} it gives one of shape {jnp.shape(updates[path])}"
            )


def _small(parameter: Parameter) -> tuple[int, ...]:
    """Returns the shape of a small tensor with as many dims, and two layers if it has any."""
    stack = (1,) * (parameter.apart - 1) + (2,) * bool(parameter.apart)
    return stack + (2,) * (len(parameter.shape) - parameter.apart)


def _equal(one: list[Any], other: list[Any]) -> bool:
    """Returns True if two trials gave the same result, except for the order of additions."""
    ours, theirs = ([_plain(x) for x in jax.tree.leaves(trial)] for trial in (one, other))
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=0, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def _plain(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x).astype(np.float64)


def _same_state_shapes(
    one: WholeTree, other: WholeTree, parameters: Mapping[str, Parameter]
) -> bool:
    """Returns True if both have states of the same shapes for these parameters."""
    values = {
        path: jax.ShapeDtypeStruct(parameter.shape, jnp.float32)
        for path, parameter in parameters.items()
    }
    shapes = [
        [x.shape for x in jax.tree.leaves(jax.eval_shape(tree.init, values))]
        for tree in (one, other)
    ]
    return shapes[0] == shapes[1]


def _draws(transformation: optax.GradientTransformation) -> bool:
    """Returns True if an update of one array draws random numbers."""
    x = jnp.ones((2, 2))

    def update(x: jax.Array) -> Any:
        return transformation.update(x, transformation.init(x), x)

    traced = str(jax.make_jaxpr(update)(x))
    return any(name in traced for name in ("random_bits", "threefry", "random_wrap"))
