"""Compares a certificate with an older one: its verdicts, and what one device trains.

An error that one device makes as well, such as a changed constant, shows up only against an older
certificate of the same settings. That works across versions of jax, because the floors of this
certificate tell rounding from a change.
"""

import json
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.lab.certify.compare import MARGIN, norm, rounding_of
from spmdtrain.lab.certify.noise import Reference
from spmdtrain.lab.certify.witnesses.mixing import APART
from spmdtrain.lab.certify.witnesses.witness import MASKED

# The second step starts from a state that was rounded differently.
OF_STEPS = (MARGIN, 8 * MARGIN)
PARTS = (("layouts", "verdict"), ("witnesses", "holds"), ("resume", "holds"), ("others", "holds"))
NAMED = 3
# Witnesses of older certificates under their present names.
RENAMED = {
    "a sample is the same whatever is beside it in the batch": APART,
    "what is masked costs nothing": MASKED,
}


def reference_values(reference: Reference) -> list[dict[str, dict[str, float]]]:
    """Returns the norms and the floors of the figures of the first steps on one device."""
    import numpy as np

    by_step = []
    steps = list(zip(reference.figures, reference.floors, strict=True))[: len(OF_STEPS)]
    for figures, floors in steps:
        norms = {str(leaf): norm(x) for leaf, x in figures.arrays.items()}
        limits = {
            str(leaf): max(
                floors.arrays.get(leaf, 0.0),
                figures.stored.get(leaf, 0.0),
                2 * figures.fine[leaf] * norm(x),
            )
            for leaf, x in figures.arrays.items()
        }
        fine = 2 * rounding_of(np.dtype("float32"))
        numbers = {f"number {name}": x for name, x in figures.numbers.items()}
        for name, x in figures.numbers.items():
            limits[f"number {name}"] = max(floors.numbers.get(name, 0.0), fine * abs(x))
        by_step.append({"norms": norms | numbers, "floors": limits})
    return by_step


def read(path: Path) -> dict[str, Any]:
    """Returns an older certificate. Raises ConfigError for any other file."""
    try:
        certificate = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name, _ in PARTS if not isinstance(certificate[name], list)]
        assert not missing and isinstance(certificate["reference"], list), missing
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        what = f"{path} is not a certificate: {type(error).__name__} {error}"
        raise ConfigError(what, fix="the .json of one") from None
    return certificate


def changes(older: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the differences between a certificate and an older one, a line each."""
    lines = []
    for part, verdict in PARTS:
        after = {result["name"]: result[verdict] for result in now[part]}
        for before in older[part]:
            name = RENAMED.get(before["name"], before["name"])
            outcome = after.get(name, "left out")
            if outcome != before[verdict]:
                lines.append(f"{name}: {before[verdict]} before, {outcome} now")
    return [*lines, *_trained(older, now)]


def _trained(older: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns a line about the first step that one device trains differently, if there is one."""
    for at, (before, after) in enumerate(zip(older["reference"], now["reference"], strict=False)):
        apart = {}
        for name, x in after["norms"].items():
            was = before["norms"].get(name)
            off = float("inf") if was is None else abs(x - was)
            limit = OF_STEPS[at] * after["floors"][name]
            if off > limit:
                apart[name] = off / limit if limit else float("inf")
        if apart:
            largest = sorted(apart, key=lambda name: -apart[name])
            named = ", ".join(largest[:NAMED])
            count = f"{len(apart)} of {len(after['norms'])} figures"
            return [f"one device trains something else from step {at + 1} on: {count}: {named}"]
    return []
