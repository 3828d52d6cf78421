"""Reads the weights from which a new run starts: those of another run, or a published model's.

Only a run with `train.init_from` imports this file.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import code_of, model_changes
from spmdtrain.checkpoints.model_code import check_model_code
from spmdtrain.checkpoints.restore import read_newest_good
from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.published.read_config import Published, is_published, read_published
from spmdtrain.config.published.write_config import as_model, function_of, remarks_on_export
from spmdtrain.config.run_files import newest_step
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.tokenizers.difference import Spec
from spmdtrain.interop.companion_files import keep_files, original_folder
from spmdtrain.interop.packings import open_published
from spmdtrain.interop.published_weights import check_dtypes
from spmdtrain.running.published.read_weights import read_weights
from spmdtrain.running.same_tokenizer import check_same
from spmdtrain.running.start.other_run import naming_settings, recorded
from spmdtrain.train.external_arrays.state_from_weights import with_wide_base
from spmdtrain.train.setup import Setup

# Settings that the shapes of tensors show anyway, or that may differ: `max_length`, a separate
# head.
OF_SHAPE = ("layers", "embed", "vocab", "max_length", "tied", "ffn")


def check_source(config: RunConfig, tokenizer: Spec | None, directory: Path, fresh: bool) -> None:
    """Checks that `train.init_from` holds weights that learned the data's tokenizer, and is not the
    run being set aside.
    """
    source = config.train.init_from
    if source is None:
        return
    _check_weights(source, directory, fresh)
    if not config.train.new_tokenizer:
        fix = (
            "data of that tokenizer, or --set train.new_tokenizer=true, which learns the rows anew"
        )
        check_same(f"train.init_from='{source}'", Path(source), tokenizer, "the data", fix)


def _check_weights(source: str, directory: Path, fresh: bool) -> None:
    setting = f"train.init_from='{source}'"
    if fresh and Path(source).resolve() == directory.resolve():
        raise ConfigError(f"{setting} is the run that --fresh sets aside", fix="another --run")
    if newest_step(Path(source)) is None:
        fix = "the directory of a trained run, or of a model of Hugging Face"
        if is_published(Path(source)):
            check_dtypes(open_published(read_published(Path(source))))
            return
        raise CheckpointError(f"{setting} holds no checkpoint", fix=fix)


def weights_of(
    source: Path, setup: Setup, say: Callable[[str], None], directory: Path | None = None
) -> dict[str, jax.Array]:
    """Returns the parameters that `train.init_from` names, and keeps the files around them in the
    run `directory`, if there is one.

    They are those of the newest intact checkpoint of another run, or of a directory of Hugging
    Face. The files are those that an export of this run includes: tokenizer and config.json.
    Weights to be stored quantised are read in their original form, or from a run that quantised
    them the same way.
    """
    if newest_step(source) is None:
        params = _published(source, with_wide_base(setup), say)
        around = source
    else:
        if not _is_quantised_alike(source, setup):
            setup = with_wide_base(setup)
        params = _of_run(source, setup, say)
        around = original_folder(source)
    if around is not None and not setup.config.model.make:
        for line in remarks_on_export(setup.config.model, read_published(around)):
            say(line)
    if around is not None and directory is not None and jax.process_index() == 0:
        keep_files(around, directory)
    return params


def _is_quantised_alike(run: Path, setup: Setup) -> bool:
    """Returns True if the weights of `run` are quantised as this run asks.

    Raises ConfigError if they are quantised differently: their originals are not in that run.
    """
    theirs = recorded(run).get("finetune.base", "float")
    ours = setup.config.finetune.base
    if theirs not in ("float", ours):
        raise ConfigError(
            f"train.init_from='{run}' holds quantised weights, without the originals",
            asked=f"finetune.base={ours!r}",
            found=f"finetune.base={theirs!r}",
            fix=f"--set finetune.base={theirs}, or the run that {run} began with",
        )
    return theirs == ours


def _published(folder: Path, setup: Setup, say: Callable[[str], None]) -> dict[str, jax.Array]:
    published = read_published(folder)
    _check_function(published, setup.config)
    params, _ = read_weights(setup, published)
    for line in published.remarks:
        say(line)
    return params


def _check_function(published: Published, config: RunConfig) -> None:
    """Raises ConfigError if [model] computes something other than the published model.

    What was set on top of `model.from` differs on purpose; any other difference is an oversight.
    The published model is read at the length of the run, by which some positions differ.
    """
    at_our_length = published.settings | {"max_length": config.model.max_length}
    theirs = function_of(as_model(at_our_length))
    ours = function_of(config.model)
    differs = [name for name in theirs if name not in OF_SHAPE and theirs[name] != ours[name]]
    from_there = str(published.folder)
    if not differs or any(where.startswith(from_there) for where in config.origin.values()):
        return
    raise ConfigError(
        f"train.init_from='{published.folder}' does not compute what [model] does",
        asked=", ".join(f"{name}={ours[name]!r:.100}" for name in differs),
        found=", ".join(f"{name}={theirs[name]!r:.100}" for name in differs),
        fix=f"--set model.from={published.folder}",
    )


def _of_run(run: Path, setup: Setup, say: Callable[[str], None]) -> dict[str, jax.Array]:
    """Returns the parameters of another run, which may lack those of adapters, but no others."""
    reading = contextlib.closing(Checkpoints(run, setup, keep=None))

    def asked_of(step: int) -> dict[str, jax.Array]:
        saved = checkpoints.parameters(step)
        of_model = setup.model.parameters
        return {
            path: x
            for path, x in setup.state.params.items()
            if path in saved or not of_model[path].is_of_adapter
        }

    with reading as checkpoints, naming_settings(run, setup):
        _, (params, meta), line = read_newest_good(
            checkpoints, run, lambda step: checkpoints.restore_params(step, asked_of(step))
        )
    if line:
        say(line)
    if begun := len(setup.state.params) - len(params):
        say(f"{run} has no adapters: {begun} arrays of them start fresh")
    setting = f"train.init_from='{run}'"
    for line in check_model_code(meta["model_code"], code_of(setup), setting):
        say(line)
    for name, then, now in model_changes(meta, setup.config):
        say(f"the weights of {run} were trained with {name}={then}; here it is {now}")
    return params
