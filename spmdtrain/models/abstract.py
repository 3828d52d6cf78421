"""Describes a model before anything is allocated: shapes and logical axes of every parameter.

Parameters travel as a flat dict, dotted path -> array. That is light for jit, and readable in
errors, checkpoints and tables. The NNX module exists only inside traced functions, where `bind`
makes it from such a dict.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import IN_STACK, Narrow, PrecisionConfig, RunConfig, TransformerConfig
from spmdtrain.models.buffer import Buffer, refusing_writes
from spmdtrain.models.choose import MakeModel
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.model import LanguageModel
from spmdtrain.models.projection import (
    FullPrecision,
    Fused,
    LoadBias,
    MatmulWeight,
    is_added,
    plain,
)
from spmdtrain.models.stack import Stack, frozen_rounds
from spmdtrain.models.transformer import Transformer
from spmdtrain.parallel.axes import (
    BATCH_AXES,
    STACK_AXES,
    Rules,
    check_names,
    drop_axes,
    owning_axes,
)
from spmdtrain.parallel.gather import GatherWeight, gathered_axes
from spmdtrain.pipeline.stage_layout import StageLayout, lay_out

Axes = tuple[str | None, ...]
# (tokens [b, t], a random key per sequence [b]) -> (tokens [b, t], those to restore [b, t])
Corrupt = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# (scales, slots) of an `Operand`, stacked like the weight, by dotted path
Scaling = Mapping[str, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Parameter:
    """The shape and logical axes of one parameter or buffer; the first `stacked` dims count layers.

    An array that is not trained is a buffer, or else *frozen*.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    is_trained: bool = True
    is_of_matmuls: bool = False  # a `MatmulWeight`
    narrow: Narrow | None = None  # the 8-bit floats in which it is multiplied
    is_buffer: bool = False
    is_of_adapter: bool = False
    is_full_precision: bool = False  # float32 at rest and in use
    is_load_bias: bool = False
    fused: Fused | None = None  # the matrices that it holds; None: it is one

    @property
    def is_frozen(self) -> bool:
        """True for a parameter that is not trained; never for a buffer."""
        return not self.is_trained and not self.is_buffer

    @property
    def stacked(self) -> int:
        return sum(axis in STACK_AXES for axis in self.axes)

    @property
    def apart(self) -> int:
        """The number of leading dims along which an optimizer treats each tensor by itself.

        They count the layers and, where they follow, the experts of a layer.
        """
        return self.stacked + (self.axes[self.stacked : self.stacked + 1] == ("experts",))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def over_stack(function: Callable, stacked: int) -> Callable:
    """Returns `function` of one layer's tensor, for all layers of a stack."""
    for _ in range(stacked):
        function = jax.vmap(function)
    return function


@dataclass(frozen=True)
class AbstractModel:
    parameters: Mapping[str, Parameter]
    graphdef: nnx.GraphDef
    variables: tuple[tuple[tuple, nnx.Variable], ...]
    make: Callable[[jax.Array], LanguageModel]
    stage_layout: StageLayout  # of the parameters in the stack `blocks`
    rows: int  # of the whole table that `head` returns
    config: TransformerConfig

    def in_stack(self, path: str) -> bool:
        """Returns True if this parameter belongs to the layers that a pipeline distributes."""
        axes = self.stage_layout.axes
        return path.startswith(IN_STACK) and self.parameters[path].axes[: len(axes)] == axes

    @property
    def has_load_biases(self) -> bool:
        """True if a bias evens out the load of experts."""
        return any(parameter.is_load_bias for parameter in self.parameters.values())

    @property
    def has_experts(self) -> bool:
        """True if a weight belongs to experts."""
        return any("experts" in parameter.axes for parameter in self.parameters.values())

    @property
    def size(self) -> int:
        """The number of parameters, without the padding of the layout."""
        return self._size_of(self.parameters)

    @property
    def trained_size(self) -> int:
        """The number of parameters that are trained, without the padding of the layout."""
        return self._size_of(path for path, one in self.parameters.items() if one.is_trained)

    def _size_of(self, paths: Iterable[str]) -> int:
        share = self.stage_layout.layers / self.stage_layout.places
        sizes = ((self.parameters[path].size, self.in_stack(path)) for path in paths)
        return sum(round(size * share) if in_stack else size for size, in_stack in sizes)

    def frozen_rounds(self, config: RunConfig) -> int:
        """Returns how many places of the stack, from the first on, `config` freezes.

        Raises ConfigError if its frozen layers are no whole number of rounds.
        """
        if not config.frozen_in_stack:
            return 0
        layers = config.model.stack_layers
        return frozen_rounds(config.frozen_in_stack, layers, self.stage_layout.layers)

    def below_the_stack(self, config: RunConfig) -> set[str]:
        """Returns the parameters outside the stack that the head does not read."""

        def head(module, tokens_bt, x_bte):
            return module.head(x_bte, ForwardContext(tokens_bt))

        length = config.train.sequence_length
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        stream = jax.ShapeDtypeStruct((1, length, config.model.embed), jnp.float32)
        above = self.read_by(head, tokens, stream)
        return {path for path in self.parameters if path not in above and not self.in_stack(path)}

    def freezing_all_but(self, trained: Collection[str]) -> "AbstractModel":
        """Returns the model with only the parameters at `trained` trained."""
        return replace(
            self,
            parameters={
                path: replace(parameter, is_trained=path in trained)
                for path, parameter in self.parameters.items()
            },
        )

    def split_trained(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns (the values that are trained, the others); only the first have gradients."""
        trained = {path: x for path, x in values.items() if self.parameters[path].is_trained}
        return trained, {path: x for path, x in values.items() if path not in trained}

    def cast(self, values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """Returns floating values of parameters in `dtype`, except those that must stay float32."""
        return {path: cast_floating(x, self.dtype(path, dtype)) for path, x in values.items()}

    def dtype(self, path: str, usual: str) -> str:
        """Returns the dtype of a floating parameter: `usual`, or float32 if it must stay that."""
        return "float32" if self.parameters[path].is_full_precision else usual

    @property
    def corrupt(self) -> Corrupt | None:
        """The corruption of a model that restores tokens; None: it predicts the next ones."""
        return getattr(self.bind({}), "corrupt", None)

    @property
    def order_reason(self) -> str:
        """The reason why the model needs its tokens in the order of the data; "" if it does not.

        A class of module declares `any_order = True` if it gives the same results for tokens in any
        order, given their positions. Subclasses do not inherit that. Modules of flax are covered by
        the modules that hold them.
        """
        if self.corrupt is not None:
            return "the model corrupts tokens by their place"
        return needs_order(self.bind({}))

    def check_blocks(self, rules: Rules, sequences: int, tokens: int) -> None:
        """Raises ConfigError if a device's part of a matmul in blocks is not made of whole blocks.

        `sequences`: of a microbatch on all devices; `tokens`: of a sequence.
        """
        if not any(parameter.narrow for parameter in self.parameters.values()):
            return
        from spmdtrain.models.layers.narrow import check_blocks

        model: Any = self.bind({})
        check_blocks(model, rules, sequences, tokens)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns fresh parameters.

        Trace it under jit with output shardings, so that none is ever whole on one device.
        """
        with nnx.use_eager_sharding(False):
            state = nnx.state(self.make(key))
        values = {_dotted(path): variable[...] for path, variable in nnx.to_flat_state(state)}
        if any(parameter.is_of_adapter for parameter in self.parameters.values()):
            from spmdtrain.models.adapters.by_path import with_magnitudes

            values = with_magnitudes(values, self.config)
        for path, x in values.items():
            if self.in_stack(path):
                values[path] = self.stage_layout.staged(x)
        return values

    def bind(
        self,
        values: Mapping[str, jax.Array],
        gather: Callable[[nnx.State], nnx.State] | None = None,
        scaling: Scaling | None = None,
    ) -> LanguageModel:
        """Returns the module that holds `values`.

        `gather` makes everything that is not stacked whole for use, as `make_gather_layer` does.
        `scaling`: for the weights whose scales come from earlier steps.
        Parameters without a value stay abstract; parts of the model that do not use them still run.
        """
        held = []
        for path, variable in self.variables:
            at = _dotted(path)
            held.append((path, variable.replace(values[at]) if at in values else variable))
        state = nnx.from_flat_state(held)
        model = nnx.merge(self.graphdef, gather(state) if gather else state)
        if scaling:
            from spmdtrain.models.layers.delayed_weight import attach_scaling

            attach_scaling(model, scaling)
        return model

    def named_variables(self) -> list[tuple[str, nnx.Variable]]:
        """Returns the abstract variables by dotted path, as in the module: layers in order."""
        return [(_dotted(path), variable) for path, variable in self.variables]

    def read_by(self, part: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> set[str]:
        """Returns the parameters on which `part(module, *arguments)` depends.

        Traces it, with all parameters whole.
        """
        values = {
            path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in self.named_variables()
        }

        def run(values, *arguments):
            return part(self.bind(values), *arguments)

        jaxpr = jax.make_jaxpr(run)(values, *arguments).jaxpr
        _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return {path for path, one in zip(sorted(values), used, strict=False) if one}


def needs_order(model: Any) -> str:
    """Returns a text that names a module of the model without `any_order`; "" if all have it."""
    for _, module in nnx.iter_modules(model):
        kind = type(module)
        if kind.__module__.startswith("flax."):
            continue
        if "any_order" not in vars(kind) or not getattr(module, "any_order", False):
            return f"{kind.__name__} does not take tokens in any order"
    return ""


def build_model(
    config: RunConfig, make: MakeModel = Transformer, stages: int = 1, chunks: int = 1
) -> AbstractModel:
    """Traces `make(config, rngs)` without allocating anything.

    With several `stages`, parameters of the stack `blocks` are distributed over them in pipeline
    layout, `chunks` per stage. A parameter without logical axes is whole on every device.

    Raises ConfigError if the model has no `embed`, `blocks` or `head`, or if the config has a rule
    for weights that the model lacks.
    """

    def build(key: jax.Array) -> LanguageModel:
        model = make(config, nnx.Rngs(params=key))
        _replace_weights(model, config, key)
        return model

    with nnx.use_eager_sharding(False):
        made: Any = nnx.eval_shape(build, jax.random.key(0))
    _name_axes(made)
    model = _check_parts(config, made)
    graphdef, state = nnx.split(model)
    segments = len(model.blocks.stacks)
    if stages > 1 and segments > 1:
        raise ConfigError(
            f"mesh.pipeline={stages}: its stages share out whole rounds of layers",
            found=f"{segments} segments of layers, each with rounds of its own",
            fix="--set mesh.pipeline=1, or so many layers that one round repeats for each stage",
        )
    layout = lay_out(model.blocks.rounds, stages, chunks)
    variables = tuple(nnx.to_flat_state(state))
    parameters = {_dotted(path): _parameter(path, variable, layout) for path, variable in variables}
    if config.finetune.has_adapters:
        from spmdtrain.models.adapters.adapt import with_frozen

        parameters = with_frozen(parameters, config.finetune)
    if config.model.has_frozen_further:
        parameters = {
            path: replace(parameter, is_trained=parameter.is_trained and path[:8] != "further.")
            for path, parameter in parameters.items()
        }
    names = {name for parameter in parameters.values() for name in parameter.axes if name}
    check_names(config.rules, names, lambda: _activation_axes(config, graphdef, state))
    rows = _table_rows(config, graphdef, state)
    return AbstractModel(parameters, graphdef, variables, build, layout, rows, config.model)


def _replace_weights(model: nnx.Module, config: RunConfig, key: jax.Array) -> None:
    """Replaces weights of a model that is being built by weights that multiply otherwise."""
    if config.finetune.has_adapters:
        from spmdtrain.models.adapters.adapt import adapt

        adapt(model, config, key)
    if config.precision.matmul != "compute":
        from spmdtrain.models.layers.narrow import narrow

        narrow(model, config.precision)


def _parameter(path: tuple, variable: nnx.Variable, layout: StageLayout) -> Parameter:
    """Returns the shape and axes of a variable; those of the layers in `layout`."""
    is_floating = jnp.issubdtype(variable.dtype, jnp.floating)
    is_buffer = isinstance(variable, Buffer)
    if not is_buffer and not (isinstance(variable, nnx.Param) and is_floating):
        raise ConfigError(
            f"{_dotted(path)}: a {type(variable).__name__} of {variable.dtype} in the model",
            fix="floating nnx.Param or spmdtrain.Buffer; dropout through ctx.dropout",
        )
    shape = tuple(variable.shape)
    axes = tuple(variable.out_sharding)
    if path[:2] == ("blocks", "layer") and axes[:1] == ("layer",):
        shape = layout.shape + shape[1:]
        axes = layout.axes + axes[1:]
    parameter = Parameter(
        shape,
        axes,
        is_trained=not is_buffer,
        is_of_matmuls=isinstance(variable, MatmulWeight),
        narrow=variable.narrow if isinstance(variable, MatmulWeight) else None,
        is_buffer=is_buffer,
        is_of_adapter=is_added(variable),
        is_full_precision=isinstance(variable, FullPrecision),
        is_load_bias=isinstance(variable, LoadBias),
    )
    of_one = shape[parameter.apart :]
    return replace(parameter, fused=_fused(path, variable.get_metadata().get("fused"), of_one))


def _fused(path: tuple, fused: Any, of_one: tuple[int, ...]) -> Fused | None:
    """Returns the matrices that a variable says it holds; `of_one`: the shape in one layer.

    Raises ConfigError if they are not one of its dims.
    """
    if fused is None:
        return None
    is_dim = isinstance(fused, Fused) and -len(of_one) <= fused.dim < 0
    size = of_one[fused.dim] if is_dim else None
    if not is_dim or min(fused.sizes, default=0) < 1 or sum(fused.sizes) != size:
        raise ConfigError(
            f"{_dotted(path)}: fused={fused}, for a weight {list(of_one)} of one layer or expert",
            fix="Fused(sizes, dim): sizes that add up to a dim, the last one as -1",
        )
    return fused


def _check_parts(config: RunConfig, model: Any) -> LanguageModel:
    """Returns the model. Raises ConfigError if it lacks a part."""
    own = type(model).__name__
    blocks = getattr(model, "blocks", None)
    layers = config.model.stack_layers
    if not isinstance(blocks, Stack):
        fix = "self.blocks = Stack(make_block, config.model.layers, rngs)"
        raise ConfigError(f"{own} has no blocks, a Stack", fix=fix)
    if blocks.count != layers:
        raise ConfigError(
            f"blocks has {blocks.count} layers",
            found=f"model.layers={config.model.layers}",
            fix="Stack(..., config.model.layers, ...)",
        )
    for name, takes in (("embed", "tokens_bt"), ("head", "x_bte")):
        if not hasattr(model, name):
            raise ConfigError(f"{own} has no {name}", fix=f"def {name}(self, {takes}, ctx)")
    return model


def _name_axes(model: nnx.Module) -> None:
    """Gives a parameter without logical axes the axes that keep it whole.

    `nnx.Param(x)` is one, as are the parameters of `nnx.Linear`. In a stack its first dim still
    counts layers.
    """
    stacks = [path for path, node in nnx.iter_graph(model) if isinstance(node, Stack)]
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Variable) or variable.has_metadata("out_sharding"):
            continue
        around = sum(path[: len(stack) + 1] == (*stack, "layer") for stack in stacks)
        axes = ("layer",) * around + (None,) * (len(variable.shape) - around)
        variable.set_metadata(out_sharding=axes)


def _table_rows(config: RunConfig, graphdef: nnx.GraphDef, state: nnx.State) -> int:
    """Returns the rows of the table [vocab, embed] that `head` returns if nothing is split."""

    def table(state, tokens_bt):
        model = nnx.merge(graphdef, state)
        ctx = ForwardContext(tokens_bt)
        with refusing_writes(model):
            return model.head(model.embed(tokens_bt, ctx), ctx)[1]

    tokens = jax.ShapeDtypeStruct((1, config.train.sequence_length), jnp.int32)
    rows = jax.eval_shape(table, state, tokens).shape[0]
    if rows < config.vocab:
        raise ConfigError(
            f"head gives a table of {rows} rows",
            found=f"model.vocab={config.vocab}",
            fix="config.model.vocab rows",
        )
    return rows


def _activation_axes(config: RunConfig, graphdef: nnx.GraphDef, state: nnx.State) -> set[str]:
    """Returns the logical axes that the model names in `ctx.constrain` and `ctx.local_map`."""
    axes = set()

    def constrain(x, *names):
        axes.update(name for name in names if isinstance(name, str))
        return x

    def local_map(function, arrays, names, *_):
        for names_of_array in names:
            constrain(None, *(names_of_array or ()))
        return function(*arrays)

    def forward(state, tokens_bt):
        model = nnx.merge(graphdef, state)
        ctx = ForwardContext(tokens_bt, ids_bt=tokens_bt, constrain=constrain, local_map=local_map)
        x_bte, _ = model.blocks(model.embed(tokens_bt, ctx), ctx)
        return model.head(x_bte, ctx)

    tokens = jax.ShapeDtypeStruct((1, config.train.sequence_length), jnp.int32)
    jax.eval_shape(forward, state, tokens)
    return axes


def make_gather_layer(rules: Rules) -> Callable[[nnx.State], nnx.State]:
    """Returns `gather(state)` for a program that leaves every mesh axis to XLA, e.g. sampling.

    Weights that are sharded over axes of the batch (`fsdp`) are used whole. A constraint asks for
    the gather only where they are used, so one layer at a time is whole.
    """
    if all(rules.sizes[axis] == 1 for axis in BATCH_AXES):
        return lambda state: state

    def whole(variable: nnx.Variable, axes: Axes) -> jax.Array:
        shared = [axis for axis in BATCH_AXES if axis not in owning_axes(axes)]
        spec = drop_axes(shared, rules.parameter_axes(axes))
        return jax.lax.with_sharding_constraint(variable[...], spec)

    return lambda state: _map_weights(whole, state)


def make_manual_gather_layer(
    rules: Rules, precision: PrecisionConfig
) -> Callable[[nnx.State], nnx.State]:
    """Returns `gather(state)` inside the region of the training step.

    The region is manual over the axes of the batch. Weights that are sharded over those axes are
    made whole, in compute precision; the others do not change.
    """

    @part("gather")
    def whole(variable: nnx.Variable, axes: Axes) -> jax.Array:
        weight = variable[...]
        spec = rules.parameter_axes(axes)
        over = gathered_axes(spec, axes)
        if not over:
            return weight
        resting = str(weight.dtype)
        compute = precision.compute if jnp.issubdtype(weight.dtype, jnp.floating) else resting
        if isinstance(variable, FullPrecision):
            compute = resting
        gather = GatherWeight(
            spec, over, resting, compute, precision.accumulate, axes[:1] == ("experts",)
        )
        return gather(weight)

    return lambda state: _map_weights(whole, state)


def _map_weights(
    function: Callable[[nnx.Variable, Axes], jax.Array], state: nnx.State
) -> nnx.State:
    """Returns the state with `function(variable, its logical axes)` instead of each weight.

    Stacked weights are left to the scan that slices them. A slice taken out of a stack still names
    the axes of its layers, but no longer has dims for them. Copies of a weight (`copies.py`), which
    have one dim more than names, are left alone.
    """

    def mapped(variable: nnx.Variable) -> nnx.Variable:
        axes = tuple(axis for axis in variable.out_sharding if axis not in STACK_AXES)
        if len(axes) < variable.ndim:
            return variable
        return variable.replace(function(variable, axes))

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, mapped(variable)) for path, variable in flat])


def cast(values: Mapping[str, jax.Array], dtype: str) -> dict[str, jax.Array]:
    """Returns floating parameters in `dtype`."""
    return {path: cast_floating(x, dtype) for path, x in values.items()}


def cast_floating(x: jax.Array, dtype: str) -> jax.Array:
    """Returns x in `dtype`, or unchanged if it holds integers."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def matmuls(dtype: str) -> contextlib.AbstractContextManager:
    """Returns a context for tracing, in which float32 matmuls do not round their factors.

    jax's default on a GPU is TF32, which keeps 10 of their 23 mantissa bits.

    For lower precision, set bfloat16.
    """
    if dtype != "float32":
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")


def _dotted(path: tuple) -> str:
    return ".".join(map(str, plain(path)))
