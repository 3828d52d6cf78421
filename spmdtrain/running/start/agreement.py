"""Compares, before the first step, what all processes of a run must have in common.

All processes run one program, and each feeds its own part of every batch. Nothing later would
reveal that two of them read different data or configurations.
"""

import functools
import hashlib
import json
import re
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

import spmdtrain
from spmdtrain.checkpoints.identity import code_of, settings_of
from spmdtrain.checkpoints.meta import MOST_NAMED
from spmdtrain.checkpoints.model_code import qualified_name, source_hash
from spmdtrain.config.errors import CheckpointError, ConfigError, DataError, UserError
from spmdtrain.config.run_files import newest_step
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.source import Data
from spmdtrain.processes.processes import gather_texts
from spmdtrain.train.setup import Setup

# The compared values by name. The name must tell a person where to find the value.
Facts = Mapping[str, Any]
PACKAGES = ("jax", "jaxlib", "flax", "optax")
# Settings of jax that change what a program computes; a shell may set them for one process.
OF_JAX = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
CORPUS, TOKENIZER, NEWEST = "the corpus", "the tokenizer", "the newest checkpoint"
# Each host may keep its data anywhere: the contents are compared.
PLACES = ("data.path", "data.tokenizer", "data.mix")
PROGRAM = "the step that is compiled"
MOST_VALUES = 3  # in one error


class Said(NamedTuple):
    """The report of one process about itself."""

    host: str
    facts: Facts


def check_start(
    config: RunConfig,
    data: Data,
    seams: Mapping[str, Any],
    directory: Path,
    fresh: bool,
    step: int | None = None,
) -> None:
    """Raises a UserError in all processes if one was started differently from process 0.

    `config` is the config as given; `seams` are what the caller replaced. All processes must call
    this.
    """
    if jax.process_count() == 1:
        return
    _compare(
        _versions()
        | _settings(config)
        | {f"{name}=": _code(part) for name, part in seams.items() if part is not None}
        | {
            "--fresh": fresh,
            "--step": step,
            CORPUS: f"{data.fingerprint[:16]} ({data.describe(config)})",
            TOKENIZER: _digest(data.tokenizer) if data.tokenizer else "none",
            "the begin of a document": data.begin_of_text,
            "the end of a document": data.end_of_text,
            "the template of conversations": data.template and _digest(data.template),
            "--run": directory,
            NEWEST: newest_step(directory),
        }
        | {
            f"{NEWEST} of {setting}": newest_step(Path(folder))
            for setting, folder in config.other_runs().items()
        }
    )


def check_model(setup: Setup) -> None:
    """Checks, like `check_start`, the code of the model and the devices of the mesh."""
    if jax.process_count() == 1:
        return
    code = code_of(setup)
    named = {**code["sources"], **code.get("own", {})}
    sources = {f"the source of {name}": digest for name, digest in named.items()}
    devices = [device.id for device in setup.mesh.devices.flat]
    _compare({"the model": code["class"]} | sources | {"the devices of the mesh": devices})


def check_program(lowered: jax.stages.Lowered) -> None:
    """Checks, like `check_start`, the traced step, which may contain numbers from a caller.

    Calls of kernels or of the host may carry file names and addresses; those are left out.
    """
    if jax.process_count() == 1:
        return
    text = re.sub(r'backend_config = "(\\.|[^"\\])*"', "", lowered.as_text())
    _compare({PROGRAM: hashlib.sha256(text.encode()).hexdigest()[:16]})


def disagreement(reports: Sequence[Said]) -> UserError | None:
    """Returns the error if processes, given in order, do not all report the same; None if they do.

    It names the first difference with its values, then the other differences.
    """
    names = dict.fromkeys(name for report in reports for name in report.facts)
    different = [name for name in names if len({_text(report, name) for report in reports}) > 1]
    if not different:
        return None
    first = different[0]
    kind, fix = _kind_and_fix(first)
    others = different[1:]
    more = ""
    if others:
        dots = ", ..." if len(others) > MOST_NAMED else ""
        more = f", and about {', '.join(others[:MOST_NAMED])}{dots}"
    return kind(
        f"the processes of this run do not agree about {first}{more}",
        found=_values(reports, first),
        fix=fix,
    )


def _compare(facts: Facts) -> None:
    mine = json.dumps(Said(socket.gethostname(), facts), default=str)
    error = disagreement([Said(*json.loads(text)) for text in gather_texts(mine)])
    if error is not None:
        raise error


def _values(reports: Sequence[Said], name: str) -> str:
    """Lists each value with the processes that report it, that of process 0 first."""
    holders: dict[str, list[int]] = {}
    for process, report in enumerate(reports):
        holders.setdefault(_text(report, name), []).append(process)
    parts = []
    for value, who in list(holders.items())[:MOST_VALUES]:
        more = f" and {len(who) - 1} more" if len(who) > 1 else ""
        parts.append(f"{value} in process {who[0]} on {reports[who[0]].host}{more}")
    rest = len(holders) - len(parts)
    return ", ".join(parts) + (f", and {rest} other values" if rest else "")


def _text(report: Said, name: str) -> str:
    value = report.facts.get(name)
    return "none" if value is None else str(value)


def _kind_and_fix(name: str) -> tuple[type[UserError], str]:
    if name in (CORPUS, TOKENIZER):
        return DataError, "the same files under data.path on every host"
    if name.startswith(NEWEST):
        return CheckpointError, "a directory that every host sees as the same one"
    if name == PROGRAM:
        return ConfigError, "the same code, with the same numbers in it, on every host"
    if name.startswith(("the source of", "version of")):
        return ConfigError, "the same code on every host"
    return ConfigError, "the same command and configuration for every process"


def _versions() -> dict[str, str | None]:
    of_packages = {f"version of {name}": _version(name) for name in PACKAGES}
    of_jax = {name: str(getattr(jax.config, name, None)) for name in OF_JAX}
    return {"version of spmdtrain": our_sources()} | of_packages | of_jax


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def our_sources() -> str:
    """Returns the version and a hash of the sources: a checkout changes while its version stays."""
    digest = hashlib.sha256()
    room = Path(spmdtrain.__file__).parent
    for path in sorted(room.rglob("*.py")):
        digest.update(path.relative_to(room).as_posix().encode())
        digest.update(path.read_bytes())
    return f"{_version('spmdtrain')} (sources {digest.hexdigest()[:16]})"


def _settings(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in settings_of(config).items() if name not in PLACES}


def _code(thing: Any) -> str:
    """Returns the name of what a caller gave, with a hash of its source if it has one."""
    source = source_hash(getattr(thing, "func", thing))
    return f"{qualified_name(thing)} (source {source})" if source else qualified_name(thing)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
