"""Compares a certificate with an older one: its verdicts, and what one device trains.

An error that one device shares, such as a changed constant, shows in comparison with an older
certificate of the same settings, whatever the version of jax: the floors of this certificate tell
rounding from a change.
"""

import json
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.lab.certify.compare import MARGIN, norm, rounding_of
from spmdtrain.lab.certify.noise import Reference

# The second step starts from a state that was rounded differently.
OF_STEPS = (MARGIN, 8 * MARGIN)
PARTS = (("layouts", "verdict"), ("witnesses", "holds"), ("resume", "holds"), ("others", "holds"))
NAMED = 3


def reference_values(reference: Reference) -> list[dict[str, dict[str, float]]]:
    """Returns the norms of the figures of the first steps on one device, and their floors."""
    import numpy as np

    found = []
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
        found.append({"norms": norms | numbers, "floors": limits})
    return found


def read(path: Path) -> dict[str, Any]:
    """Returns an older certificate. Raises ConfigError for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name, _ in PARTS if not isinstance(found[name], list)]
        assert not missing and isinstance(found["reference"], list), missing
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        what = f"{path} is not a certificate: {type(error).__name__} {error}"
        raise ConfigError(what, fix="the .json of one") from None
    return found


def changes(older: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the differences between a certificate and an older one, a line each."""
    found = []
    for part, verdict in PARTS:
        after = {each["name"]: each[verdict] for each in now[part]}
        for each in older[part]:
            said = after.get(each["name"], "left out")
            if said != each[verdict]:
                found.append(f"{each['name']}: {each[verdict]} before, {said} now")
    return [*found, *_trained(older, now)]


def _trained(older: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the figures that one device trains differently, step by step, largest first."""
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
