"""Identifies a run by its data, its model's code, and the function its weights compute.

These are saved with every checkpoint and compared when a run resumes. Settings that may change in
between are saved too, so that a run can report what has changed.
"""

import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from spmdtrain.checkpoints.model_code import ModelCode, check_model_code, model_code, qualified_name
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.load import resolved
from spmdtrain.config.own_parts import own_sources
from spmdtrain.config.schema import RunConfig, Settings, TransformerConfig
from spmdtrain.data.source import Data
from spmdtrain.train.joined import LearnedFrom
from spmdtrain.train.setup import Setup

Meta = dict[str, Any]
# name -> (value in the checkpoint, value now)
Changes = dict[str, tuple[Any, Any]]
# The settings that say where a corpus comes from.
DATA = (
    *("data.corpus", "data.path", "data.tokenizer", "data.field", "data.begin_of_text"),
    *("data.mix", "data.phases"),
)
# Settings of [model] that show in the presence or shape of a leaf, and settings that do not change
# the function that the weights compute.
OF_SHAPES = {"layers", "embed", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_length"} | {
    *("bias", "qkv_bias", "out_bias", "mlp_bias", "tied", "sinks"),
}
OF_NO_FUNCTION = {"name", "dropout", "make", "extra", *TransformerConfig.of_placement}


class DescribedData(Protocol):
    """The data of a run as config.json records it."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> dict | None: ...
    @property
    def begin_of_text(self) -> int | None: ...
    @property
    def end_of_text(self) -> int | None: ...
    @property
    def template(self) -> str | dict | None: ...


def config_document(setup: Setup, data: DescribedData) -> dict[str, Any]:
    """Returns the contents of RUN/config.json.

    These are every setting with its origin, the data's fingerprint, the tokenizer, the ids that
    begin and end its documents, and the code of the model.
    """
    return resolved(setup.config) | {
        "corpus": data.fingerprint,
        "tokenizer": data.tokenizer,
        "begin_of_text": data.begin_of_text,
        "end_of_text": data.end_of_text,
        "template": data.template,
        "model_code": code_of(setup),
    }


def code_of(setup: Setup) -> ModelCode:
    """Returns the record of the model's code, see model_code.py, and of the parts in [own]."""
    code = model_code(setup.make, setup.model.bind({}), setup.config.model.make)
    own = own_sources(setup.config)
    return code | {"own": own} if own else code


def identity(setup: Setup, fingerprint: str, seams: Mapping[str, Any]) -> Meta:
    """Returns the description of the run that its checkpoints keep.

    `fingerprint` is that of the data; `seams` are the parts that the caller replaced (None: not
    replaced).
    """
    return {
        "stream": _stream(setup.config, fingerprint),
        "model": model_function(setup.config),
        "model_code": code_of(setup),
        "settings": _changeable(setup.config, seams),
    } | {kind: source.digest for kind, source in _sources(setup).items()}


def _sources(setup: Setup) -> dict[str, LearnedFrom]:
    """Returns what a run learns from besides its data, by its kind."""
    kinds = (joined.learns_from() for joined in setup.own.values())
    return {kind: source for sources in kinds for kind, source in sources.items()}


def changes(meta: Meta, config: RunConfig, seams: Mapping[str, Any]) -> Changes:
    """Returns the changeable settings that have changed, as setting -> (then, now)."""
    then = meta["settings"]
    now = _changeable(config, seams)
    names = dict.fromkeys([*then, *now])
    return {
        name: (then.get(name), now.get(name)) for name in names if then.get(name) != now.get(name)
    }


def describe_changes(changed: Changes) -> str:
    """Returns `changes` as readable text: "train.clip: 1.0, now none; ..."."""
    parts = []
    for name, (then, now) in changed.items():
        then = "none" if then is None else then
        now = "none" if now is None else now
        parts.append(f"{name}: {then}, now {now}")
    return "; ".join(parts)


def check_identity(
    meta: Meta, setup: Setup, data: Data, where: str, recorded: Mapping[str, Any]
) -> list[str]:
    """Returns notes about changed code.

    Raises CheckpointError if the checkpoint's data, code or function is not this run's. `where`
    names the checkpoint; `recorded` has the settings of its run by dotted name, see other_run.py.
    """
    config = setup.config
    notes = check_model_code(meta["model_code"], code_of(setup), where)
    for name, now in _stream(config, data.fingerprint).items():
        then = meta["stream"].get(name)
        if then != now:
            if name == "corpus":
                refuse_other_settings(
                    "the corpus is not the one this run was trained on", DATA, config, recorded
                )
            raise CheckpointError(
                _what_changed(name),
                asked=str(now)[:16],
                found=f"{str(then)[:16]} in the checkpoint",
                fix="the same data and seed, or --fresh for a new run",
            )
    for kind, source in _sources(setup).items():
        then = meta.get(kind)
        if then not in (None, source.digest):
            raise CheckpointError(
                f"{where} learned from another {kind} than {source.setting}",
                asked=source.digest,
                found=f"{then} in the checkpoint",
                fix=f"the {kind} of that run, or --fresh for a new run",
            )
    for name, then, now in model_changes(meta, config):
        raise CheckpointError(
            f"{name} has changed",
            asked=str(now),
            found=f"{then} in the checkpoint",
            fix=f"{as_setting(name, then)}, or a new --run with train.init_from",
        )
    return notes


def model_changes(meta: Meta, config: RunConfig) -> list[tuple[str, Any, Any]]:
    """Returns the changed settings that decide which function the weights compute.

    Each is (setting, its value in the checkpoint, its value now).
    """
    then = meta["model"]
    now = model_function(config)
    changed = [name for name in now if name in then and then[name] != now[name]]
    return [(name, then[name], now[name]) for name in changed]


def refuse_other_settings(
    what: str,
    names: Collection[str],
    config: RunConfig,
    recorded: Mapping[str, Any],
    fix: str = "",
) -> None:
    """Raises CheckpointError with both values of each named setting that differs from its record.

    `fix` is the remedy; without it, it is to set the recorded values. Does nothing if none differs,
    or if nothing was recorded.
    """
    now = settings_of(config)
    other = [name for name in names if recorded and recorded.get(name) != now.get(name)]
    if not other:
        return

    def listed(settings: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={_shown(settings.get(name))}" for name in other)

    then = [recorded.get(name) for name in other]
    if fix:
        raise CheckpointError(
            what, asked=listed(now), found=f"{listed(recorded)} in the run", fix=fix
        )
    fix = "the settings of that run"
    if all(isinstance(value, bool | int | float | str) for value in then):
        fix = " ".join(as_setting(name, recorded[name]) for name in other)
    raise CheckpointError(
        what,
        asked=listed(now),
        found=f"{listed(recorded)} in the run",
        fix=f"{fix}, or another --run",
    )


def as_setting(name: str, value: Any) -> str:
    """Returns the option that sets `name` to `value`; of a table, the section to copy."""
    if isinstance(value, Mapping):
        return f"the [{name}] of that run"
    return f"--set {shlex.quote(f'{name}={_shown(value)}')}"


def _shown(value: Any) -> str:
    """Returns a value in the form that `--set` accepts."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Returns every setting by its dotted name, as JSON stores it; None where it is derived."""
    return flat(config.as_given())


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested settings, by dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def _what_changed(name: str) -> str:
    if name == "corpus":
        return "the corpus is not the one this run was trained on"
    return f"{name} has changed"


def _stream(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    """Returns the settings that map a sample index to tokens, and the data's fingerprint."""
    blocks = {}
    if config.data.is_streamed and config.data.shuffle:
        blocks = {"data.shuffle_buffer": config.data.shuffle_buffer}
    return blocks | {
        "train.seed": config.train.seed,
        "train.sequence_length": config.train.sequence_length,
        "data.shuffle": config.data.shuffle,
        "data.packing": config.data.packing,
        "data.validation_fraction": config.data.validation_fraction,
        "corpus": fingerprint,
    }


def model_function(config: RunConfig) -> dict[str, Any]:
    """Returns the settings, shapes aside, that decide which function the weights compute."""
    model = config.model
    left_out = OF_SHAPES | OF_NO_FUNCTION
    if model.positions != "rope":
        left_out |= {"rope_theta"}
    values = model.as_given()
    shipped = {f"model.{name}": value for name, value in values.items() if name not in left_out}
    if config.finetune.has_adapters:
        for name in ("alpha", "rank_stabilised"):
            shipped[f"finetune.{name}"] = getattr(config.finetune, name)
    return shipped | {f"model.extra.{name}": value for name, value in model.extra.items()}


def _shown_after(section: str) -> int:
    """Returns the place of a section among those whose changes a run prints."""
    first = ("optimizer", "precision", "train")
    return first.index(section) if section in first else len(first)


def _changeable(config: RunConfig, seams: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that affect the numbers of a run but may change when it resumes.

    A part that the caller replaced is listed under its keyword, by its qualified name.
    """
    sections = {
        name: section.affecting_numbers()
        for name in sorted(type(config).model_fields, key=_shown_after)
        if isinstance(section := getattr(config, name), Settings)
    }
    settings = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
    }
    replaced = {
        f"{name}=": qualified_name(part) for name, part in seams.items() if part is not None
    }
    return settings | replaced
