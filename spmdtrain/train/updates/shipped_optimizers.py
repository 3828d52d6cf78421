"""Builds the optimizers that a config can name, as optax transformations.

None of them includes the learning rate: `updates` returns what is scaled by it and subtracted. Each
sees one layer's tensor, or one expert's. The leaves of a state have the same names whatever the
values of the settings, so a run can resume with another decay or momentum.

Weight decay acts only on matrices (parameter_kinds.py), and so do rules that need a matrix.
"""

import difflib
import zlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import optax

from spmdtrain.config.arguments import check_kind, shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import (
    Adafactor,
    AdamW,
    Lamb,
    Lion,
    Muon,
    OptimizerConfig,
    ParameterGroup,
    ScheduleFreeAdamW,
    Sgd,
    Soap,
)
from spmdtrain.models.abstract import Parameter
from spmdtrain.train.updates.optimizers import GradientPoint, Rule, UpdateRules
from spmdtrain.train.updates.parameter_kinds import is_matrix, is_table, stream_dim, width_rate

Transformation = optax.GradientTransformation
EVERY = ParameterGroup(match="*")  # the group of what no group matches


def make_optimizer(
    config: OptimizerConfig, width_factor: float = 1.0
) -> Callable[[str, Parameter], Rule | None]:
    """Returns the optimizer that these settings ask for, as a function of path and parameter.

    The function returns None for a parameter that a group freezes. `width_factor`: how many times
    wider the model is than that of `model.mup_base`, which divides the rates of some kinds of
    parameters (parameter_kinds.py). Weight decay times rate does not change with the
    width, so a step decays weights by the same share in every width (arXiv:2405.13698).
    """
    check_kind(config, tuple(BUILDERS), "config", "config.optimizer")
    build = BUILDERS[type(config)]
    point: GradientPoint | None = None
    if isinstance(config, ScheduleFreeAdamW):
        from spmdtrain.train.updates.transformations.schedule_free import gradient_point

        point = partial(gradient_point, config.beta1)

    def choose(path: str, parameter: Parameter) -> Rule | None:
        if not isinstance(path, str) or not isinstance(parameter, Parameter):
            what = f"an optimizer is called with {shown(path)} and {type(parameter).__name__}"
            raise ConfigError(what, fix="the path and the Parameter that optimizer= is called with")
        group = next((group for group in config.groups if fnmatchcase(path, group.match)), EVERY)
        if group.frozen:
            return None
        of_width = 1.0 if width_factor == 1 else width_rate(config, path, parameter, width_factor)
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        own = config
        if decay != config.weight_decay or of_width != 1:
            own = config.model_copy(update={"weight_decay": decay / of_width})
        return Rule(_resting(build(own, path, parameter), own, path), group.rate * of_width, point)

    return choose


def shipped_update_rules(
    config: OptimizerConfig, parameters: Mapping[str, Parameter], width_factor: float = 1.0
) -> UpdateRules:
    """Returns the rule of each parameter that is not frozen, by these settings.

    Raises ConfigError if a group has no parameter, all parameters are frozen, or one is of no kind
    that `width_factor` knows.
    """
    for group in config.groups:
        if not any(fnmatchcase(path, group.match) for path in parameters):
            near = difflib.get_close_matches(group.match, parameters, 1) or sorted(parameters)[:1]
            raise ConfigError(
                f"optimizer.groups: no parameter matches {group.match!r}",
                fix=f"a pattern of paths such as {near[0]}",
            )
    choose = make_optimizer(config, width_factor)
    chosen = {path: choose(path, parameter) for path, parameter in parameters.items()}
    update_rules = {path: rule for path, rule in chosen.items() if rule is not None}
    if not update_rules:
        what = f"optimizer.groups freezes all {len(parameters)} parameters"
        raise ConfigError(what, fix="a group that matches less")
    return update_rules


def _resting(transformation: Transformation, config: OptimizerConfig, path: str) -> Transformation:
    """Returns the transformation with its moments stored as `optimizer.moment_dtype` asks."""
    if config.moment_dtype == "bfloat16":
        from spmdtrain.train.updates.transformations.small_moments import in_bfloat16

        return in_bfloat16(transformation)
    if config.moment_dtype == "8bit":
        from spmdtrain.train.updates.transformations.small_moments import in_8_bits

        return in_8_bits(transformation, zlib.crc32(path.encode()) >> 1)
    return transformation


def _adamw(config: AdamW | Lamb | Muon | Soap, path: str, parameter: Parameter) -> Transformation:
    """Returns Adam with decoupled weight decay (arXiv:1711.05101)."""
    rule = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    return optax.chain(rule, *_decay(config, path, parameter))


def _adafactor(config: Adafactor, path: str, parameter: Parameter) -> Transformation:
    """Returns Adafactor: squares of a large matrix by row and column only (arXiv:1804.04235).

    As in the paper, an update is scaled by the root mean square of its parameter. After a thousand
    steps squares change by less than bfloat16 resolves, so they rest in float32.
    """
    from spmdtrain.train.updates.transformations.small_moments import with_float32_state

    return optax.chain(
        with_float32_state(optax.scale_by_factored_rms(decay_rate=config.decay_rate)),
        optax.clip_by_block_rms(config.clip_update),
        optax.scale_by_param_block_rms(),
        *_decay(config, path, parameter),
    )


def _lamb(config: Lamb, path: str, parameter: Parameter) -> Transformation:
    """Returns LAMB: AdamW, each update scaled to the norm of its matrix (arXiv:1904.00962)."""
    trust = [optax.scale_by_trust_ratio()] if is_matrix(path, parameter) else []
    return optax.chain(_adamw(config, path, parameter), *trust)


def _lion(config: Lion, path: str, parameter: Parameter) -> Transformation:
    """Returns Lion, with decoupled weight decay (arXiv:2302.06675).

    Its update is the sign of an interpolated momentum.
    """
    rule = optax.scale_by_lion(config.beta1, config.beta2)
    return optax.chain(rule, *_decay(config, path, parameter))


def _muon(config: Muon, path: str, parameter: Parameter) -> Transformation:
    """Returns Muon: orthogonalised momentum for the matrices of layers, AdamW for the rest.

    A weight that says which matrices it holds (`Fused`) is updated matrix by matrix, such as the
    projections of linear-time mixers. Any other is one matrix: also attention's queries, keys and
    values, and the gate and input of an mlp. An update has the root mean square of one of AdamW
    (arXiv:2502.16982), so both take the same learning rate and weight decay.
    """
    if not is_matrix(path, parameter) or is_table(parameter):
        return _adamw(config, path, parameter)
    from spmdtrain.train.updates.transformations.muon import muon

    shape = parameter.shape[parameter.apart :]
    orthogonal = muon(config.momentum, shape, stream_dim(parameter), parameter.fused)
    return optax.chain(orthogonal, *_decay(config, path, parameter))


def _schedule_free_adamw(
    config: ScheduleFreeAdamW, path: str, parameter: Parameter
) -> Transformation:
    """Returns AdamW without momentum, whose weights are an average (arXiv:2405.15682).

    Weight decay acts at the point where the gradient is taken.
    """
    squares = optax.scale_by_rms(
        config.beta2, config.epsilon, eps_in_sqrt=False, bias_correction=True
    )
    base = optax.chain(squares, *_decay(config, path, parameter))
    from spmdtrain.train.updates.transformations.schedule_free import schedule_free

    return schedule_free(base, config.beta1)


def _sgd(config: Sgd, path: str, parameter: Parameter) -> Transformation:
    """Returns SGD: momentum of gradients that include the weight decay."""
    rule = optax.chain(optax.trace(config.momentum))
    decay = _decay(config, path, parameter)
    if not decay:
        return rule

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # A chain's state would differ from that of `rule`.
        decayed = jax.tree.map(lambda g, x: g + config.weight_decay * x, updates, params)
        return rule.update(decayed, state, params)

    return Transformation(rule.init, update)


def _soap(config: Soap, path: str, parameter: Parameter) -> Transformation:
    """Returns SOAP for the matrices of layers, AdamW for the rest (arXiv:2409.11321).

    A tensor with more dims is the matrix from the stream to all the others, or back, as in Muon.
    """
    if not is_matrix(path, parameter) or is_table(parameter):
        return _adamw(config, path, parameter)
    from spmdtrain.train.updates.transformations.soap import BasisSettings, soap

    bases = BasisSettings(
        config.basis_every, config.basis_beta, config.basis_largest, stream_dim(parameter)
    )
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    return optax.chain(soap(adam, bases), *_decay(config, path, parameter))


def _decay(config: OptimizerConfig, path: str, parameter: Parameter) -> list[Transformation]:
    """Returns weight decay as the last link of a chain, or nothing if it does not act."""
    if not config.weight_decay or not is_matrix(path, parameter):
        return []
    return [optax.add_decayed_weights(config.weight_decay)]


BUILDERS: Mapping[type[OptimizerConfig], Callable[[Any, str, Parameter], Transformation]] = {
    Adafactor: _adafactor,
    AdamW: _adamw,
    Lamb: _lamb,
    Lion: _lion,
    Muon: _muon,
    ScheduleFreeAdamW: _schedule_free_adamw,
    Sgd: _sgd,
    Soap: _soap,
}
