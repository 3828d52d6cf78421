"""The settings that may be changed when a run is read rather than trained.

A name that ends in a dot stands for a section. A new run may set them all (`ALL`).
"""

from collections.abc import Sequence

from spmdtrain.config.errors import ConfigError

ALL = ("",)
# Settings of the devices, not of the run.
OF_DEVICES = ("mesh.", "rules.", "model.attention")
OF_EVALUATION = (
    *OF_DEVICES,
    "data.packing",
    "data.validation_fraction",
    "pipeline.",
    "eval.batches",
    "precision.compute",
    "train.global_batch",
    "train.microbatch",
    "train.sequence_length",
)
OF_REFERENCE = (
    *OF_DEVICES,
    "precision.compute",
    "train.global_batch",
    "train.microbatch",
    "train.sequence_length",
)
# Where data are; that they are the same is checked by fingerprints.
OF_PLACES = ("data.path", "data.tokenizer", "distill.logits")
# What a replay may change: where it computes, never what.
OF_REPLAY = (
    *("mesh.", "rules.", "pipeline.", "kernels."),
    *("train.microbatch", "train.zero", "train.remat", "train.scan_layers"),
    *("model.attention", "data.read_ahead"),
    *OF_PLACES,
)


def is_settable(key: str, settable: Sequence[str]) -> bool:
    """Returns True if `settable` names a setting or its section."""
    key = key.strip()
    return any(
        key == name or (name[-1:] in ("", ".") and key.startswith(name)) for name in settable
    )


def check_settable(overrides: Sequence[str], settable: Sequence[str]) -> None:
    """Raises ConfigError if an override `a.b=c` would change what the run is."""
    for override in overrides:
        if not is_settable(override.partition("=")[0], settable):
            names = [f"{name}*" if name.endswith(".") else name for name in settable]
            raise ConfigError(
                "a run is read with the settings it was trained with",
                asked=f"--set {override}",
                fix=f"--set of {', '.join(names)}",
            )
