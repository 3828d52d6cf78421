"""Chooses the codecs with error feedback: which gradients cross `data` compressed, and how."""

import difflib
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import CompressionConfig, RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.parallel.feedback.feedback_sums import FeedbackCodec
from spmdtrain.parallel.feedback.largest import Largest
from spmdtrain.parallel.feedback.low_rank import LowRank, pays
from spmdtrain.train.updates.parameter_kinds import is_matrix, stream_dim


def feedback_codecs(
    config: RunConfig, model: AbstractModel, sizes: Mapping[str, int]
) -> dict[str, FeedbackCodec]:
    """Returns how gradients of matrices cross `data`, by path, for codecs with error feedback.

    A matrix whose factors have more numbers than itself, and one that has not a number to send for
    each device, have no codec. Neither have others if the settings ask for none of these. Raises
    ConfigError if they do and no matrix can have one, or if a pattern of `compression.ranks` has
    no effect.
    """
    settings = config.compression
    if not settings.has_feedback or sizes["data"] == 1:
        return {}
    matrices = {
        path: parameter
        for path, parameter in model.parameters.items()
        if parameter.is_trained and is_matrix(path, parameter)
    }
    matched = {path: _first_match(settings, path) for path in matrices}
    codecs: dict[str, FeedbackCodec] = {}
    for path, parameter in matrices.items():
        shape = parameter.shape[parameter.apart :]
        row = stream_dim(parameter)
        rank = settings.ranks.get(matched[path], settings.rank)
        if rank and pays(shape, row, rank):
            codecs[path] = LowRank(rank, parameter.apart, row)
        if settings.keep is not None and math.prod(shape) * settings.keep >= sizes["data"]:
            codecs[path] = Largest(settings.keep)
    for pattern in settings.ranks:
        _check_pattern(settings, pattern, matched, codecs)
    if not codecs:
        raise _no_codec(settings, sizes["data"], matched)
    return codecs


def _no_codec(settings: CompressionConfig, shards: int, matched: Mapping[str, str]) -> ConfigError:
    """Returns the error to raise if no matrix can be compressed."""
    if settings.ranks and all(matched.values()):
        what = "compression.ranks gives every matrix the rank 0: nothing is compressed"
        return ConfigError(what, fix="compression.codec=none")
    fix = "or compression.codec=int8"
    if settings.rank is not None:
        what = f"compression.rank={settings.rank}: no matrix has more numbers than its two factors"
        return ConfigError(what, fix=f"a lower compression.rank, {fix}")
    what = f"compression.keep={settings.keep:g}: no matrix has a number to send for each of the "
    return ConfigError(
        f"{what}{shards} devices of mesh.data", fix=f"a larger compression.keep, {fix}"
    )


def _first_match(settings: CompressionConfig, path: str) -> str:
    """Returns the first pattern of `compression.ranks` that matches a path; "" if none does."""
    return next((pattern for pattern in settings.ranks if fnmatchcase(path, pattern)), "")


def _check_pattern(
    settings: CompressionConfig,
    pattern: str,
    matched: Mapping[str, str],
    codecs: Mapping[str, FeedbackCodec],
) -> None:
    """Refuses a pattern that gives no matrix its rank.

    `matched`: the first pattern that matches each matrix.
    """
    what = f"compression.ranks: {pattern!r}"
    own = [path for path, first in matched.items() if first == pattern]
    earlier = [first for path, first in matched.items() if fnmatchcase(path, pattern)]
    if not earlier:
        near = difflib.get_close_matches(pattern, list(matched), 1, 0.3) or list(matched)
        raise ConfigError(
            f"{what} is the path of no trained matrix",
            fix=f"a pattern of paths such as {near[0]}",
        )
    if not own:
        raise ConfigError(
            f"{what} comes after {earlier[0]!r}, which leaves it no matrix",
            fix=f"{pattern!r} before it",
        )
    rank = settings.ranks[pattern]
    if rank and not codecs.keys() & set(own):
        raise ConfigError(
            f"{what} = {rank}: no matrix of it has more numbers than its two factors",
            fix=f"a lower rank, or {pattern!r} = 0: not compressed",
        )
