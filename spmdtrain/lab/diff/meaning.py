"""Says which part of a step a setting decides, which is how two runs are compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spmdtrain.checkpoints.identity import flat
from spmdtrain.config.schema import RunConfig

# The parts of a step in order: its tokens, its rate, its loss, its gradients, and its update.
# "placement" is where a step computes, and "none" is for settings that no step reads.
Kind = Literal["data", "rate", "loss", "gradient", "update", "placement", "none"]

NO_STEP = (
    *("log.", "checkpoint.", "eval.", "mesh.elastic"),
    *("data.read_ahead", "data.workers", "data.cache"),
)
PLACEMENT = (
    *("mesh.", "rules.", "pipeline.", "kernels."),
    *("train.microbatch", "train.zero", "train.remat", "train.scan_layers"),
    "model.attention",
    "model.context_attention",
)
DATA = (
    *("data.", "train.seed"),
    *("train.global_batch", "train.sequence_length", "train.stages"),
)
RATE = (
    *("optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup"),
    *("optimizer.final_learning_rate", "optimizer.decay_share", "train.steps", "train.epochs"),
    "optimizer.rate_by_batch",
)
GRADIENT = ("precision.accumulate", "precision.loss_scale")
UPDATE = ("optimizer.", "train.clip", "precision.rounding")
# The first entry with a prefix of the setting decides, unless its section does (`decides`).
DECIDED: tuple[tuple[tuple[str, ...], Kind], ...] = (
    (NO_STEP, "none"),
    (PLACEMENT, "placement"),
    (DATA, "data"),
    (RATE, "rate"),
    (GRADIENT, "gradient"),
    (UPDATE, "update"),
)
PLACES = ("data.path", "data.validation_path", "data.tokenizer")  # the location of the data


@dataclass(frozen=True)
class Changed:
    """A setting that differs: its value in A and in B, and what it decides."""

    name: str
    a: Any
    b: Any
    decides: Kind


def kind_of(name: str, same_data: bool = False) -> Kind:
    """Returns what a setting decides, by its dotted name.

    With `same_data` both runs are known to read the same tokens, wherever these are stored.
    """
    if same_data and name.startswith(PLACES):
        return "none"
    section, _, setting = name.partition(".")
    decides = _decided_in(section)
    if kind := decides.get(setting, decides.get("")):
        return kind
    for starts, kind in DECIDED:
        if name.startswith(starts):
            return kind
    return "loss"


def _decided_in(section: str) -> Mapping[str, Any]:
    field = RunConfig.model_fields.get(section)
    return getattr(field.annotation, "decides", {}) if field else {}


def changed_settings(
    a: Mapping[str, Any], b: Mapping[str, Any], same_data: bool
) -> tuple[list[Changed], int]:
    """Returns the settings that differ between two resolved configs, and the number of settings.

    A setting that one version does not have counts as None there.
    """
    then, now = flat(a), flat(b)
    names = list(dict.fromkeys([*then, *now]))
    return [
        Changed(name, then.get(name), now.get(name), kind_of(name, same_data))
        for name in names
        if then.get(name) != now.get(name)
    ], len(names)
