"""Sums gradients over `data` by codecs with error feedback, in place of the plain sum."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.parallel.axes import keep_axes
from spmdtrain.parallel.feedback.feedback_sums import Codecs, Feedback, feedback_sums
from spmdtrain.parallel.reduce import psum_tree
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.train.compression.feedback_codecs import feedback_codecs
from spmdtrain.train.compression.feedback_items import ERRORS, FACTORS
from spmdtrain.train.joined import Joined
from spmdtrain.train.part import Part, Reading, SumOverData
from spmdtrain.train.setup import Setup

NAME = "compression"
Arrays = dict[str, jax.Array]  # by dotted path


@dataclass(frozen=True)
class CodecsOfRun(Joined):
    """The codecs of a run, by dotted path of the compressed parameters."""

    codecs: Codecs


def _join(setup: Setup) -> Setup:
    codecs = feedback_codecs(setup.config, setup.model, setup.mesh.shape)
    return replace(setup, own={**setup.own, NAME: CodecsOfRun(codecs)}) if codecs else setup


def _make_reading(setup: Setup) -> Reading | None:
    """Makes the reading of both items, by name: what earlier steps have not sent."""
    joined, abstract = setup.own.get(NAME), _of_items(setup.state.items)
    if not isinstance(joined, CodecsOfRun) or abstract is None:
        return None
    specs = jax.tree.map(lambda x: keep_axes(MANUAL_AXES, x.sharding.spec), abstract)
    return Reading(
        lambda _, inputs: _of_items(inputs.items),
        specs,
        in_use=None,
        data_sum=_make_data_sum(setup, joined.codecs),
    )


def _of_items(items: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the items of a state that a codec carries; None without codecs."""
    if ERRORS.name not in items:
        return None
    return {ERRORS.name: items[ERRORS.name], FACTORS.name: items.get(FACTORS.name, {})}


def _make_data_sum(setup: Setup, codecs: Codecs) -> SumOverData:
    """Makes the compressed sum; the first `compression.after` steps sum uncompressed."""
    after = setup.config.compression.after

    def coded(own: Arrays, unsent: Feedback) -> tuple[Arrays, Feedback]:
        return feedback_sums(
            own, unsent, {path: codecs[path] for path in own}, setup.specs, MANUAL_AXES
        )

    def full(own: Arrays, unsent: Feedback) -> tuple[Arrays, Feedback]:
        return psum_tree(own, ("data",)), unsent

    def sums(
        own: Arrays, arrays: dict[str, Arrays], step: jax.Array
    ) -> tuple[Arrays, dict[str, Any]]:
        unsent = Feedback(arrays[ERRORS.name], arrays[FACTORS.name])
        wide = {path: x.astype(jnp.float32) for path, x in own.items()}
        if after:
            summed, unsent = jax.lax.cond(step < after, full, coded, wide, unsent)
        else:
            summed, unsent = coded(wide, unsent)
        return summed, {ERRORS.name: unsent.errors, FACTORS.name: unsent.factors}

    return SumOverData(lambda arrays: arrays[ERRORS.name], sums)


COMPRESSION = Part(NAME, items=(ERRORS, FACTORS), join=_join, make_reading=_make_reading)
