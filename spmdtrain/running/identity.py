"""What makes a run the same run: its data, and the function that its weights compute.

Both are saved with every checkpoint and compared when a run goes on.
"""

from typing import Any

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.load import resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.source import Data

Meta = dict[str, Any]


def config_document(config: RunConfig, data: Data) -> dict[str, Any]:
    """RUN/config.json: every setting with its origin, the data's fingerprint, the tokenizer."""
    return resolved(config) | {"corpus": data.fingerprint, "tokenizer": data.tokenizer}


def identity(config: RunConfig, fingerprint: str) -> Meta:
    """What a checkpoint keeps of the run; `fingerprint` is that of its data."""
    return {"stream": _stream(config, fingerprint), "model": _model_function(config)}


def check_identity(meta: Meta, config: RunConfig, fingerprint: str) -> None:
    """CheckpointError where the checkpoint's data or function is not this run's."""
    for name, now in _stream(config, fingerprint).items():
        then = meta.get("stream", {}).get(name)
        if then != now:
            raise CheckpointError(
                _what_changed(name),
                asked=str(now)[:16],
                found=f"{str(then)[:16]} in the checkpoint",
                fix="the same data and seed, or --fresh for a new run",
            )
    for name, then, now in model_changes(meta, config):
        raise CheckpointError(
            f"{name} has changed",
            asked=str(now),
            found=f"{then} in the checkpoint",
            fix=f"--set {name}={then}, or a new --run with train.init_from",
        )


def model_changes(meta: Meta, config: RunConfig) -> list[tuple[str, Any, Any]]:
    """(setting, its value in the checkpoint, its value now) where the function of the weights
    differs. An older checkpoint, which does not say what its own was, differs in nothing."""
    then = meta.get("model", {})
    now = _model_function(config)
    changed = [name for name in now if name in then and then[name] != now[name]]
    return [(name, then[name], now[name]) for name in changed]


def _what_changed(name: str) -> str:
    if name == "corpus":
        return "the corpus is not the one this run was trained on"
    return f"{name} has changed"


def _stream(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    """The settings that decide which tokens a sample index means, and the data's fingerprint."""
    return {
        "train.seed": config.train.seed,
        "train.sequence_length": config.train.sequence_length,
        "data.shuffle": config.data.shuffle,
        "data.packing": config.data.packing,
        "data.validation_fraction": config.data.validation_fraction,
        "corpus": fingerprint,
    }


def _model_function(config: RunConfig) -> dict[str, Any]:
    """The settings, beyond the shapes, that decide which function the weights compute."""
    model = config.model
    names = ["positions", "norm", "mlp", "norm_epsilon"]
    if model.positions == "rope":
        names.append("rope_theta")
    return {f"model.{name}": getattr(model, name) for name in names}
