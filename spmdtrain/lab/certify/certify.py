"""Certifies that a run trains the same on every layout as on one device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from spmdtrain.config.errors import ConfigError, UserError
from spmdtrain.lab.certify.against import reference_values
from spmdtrain.lab.certify.compare import (
    BATCH,
    INITIAL,
    FigureApart,
    differences,
    first_of,
    unequal,
    without_step,
)
from spmdtrain.lab.certify.cover import DEVICES, Layout
from spmdtrain.lab.certify.noise import Reference, make_reference
from spmdtrain.lab.certify.shrink import Shrunk
from spmdtrain.lab.certify.stepper import Own, Stepper, hash_of
from spmdtrain.lab.certify.witnesses.mixing import APART, samples_apart
from spmdtrain.lab.certify.witnesses.resume import resumed, with_settings
from spmdtrain.lab.certify.witnesses.witness import Witness, witnesses

Verdict = Literal["agrees", "differs", "broken", "refused", "not reached"]
Say = Callable[[str], None]
NAMED = 6  # differences that are kept of a layout, in addition to the first


@dataclass(frozen=True)
class Examined:
    """A layout compared with the reference.

    `ratios`: those of all figures, in floors, largest first. `first`: what differs first in the
    order of the step, or else the figure with the largest ratio; `worst` has those with the
    largest. `said`: why the layout is refused or broken. `precision`: float32, or asked.
    """

    layout: Layout
    verdict: Verdict
    ratios: list[float] = field(default_factory=list)
    first: FigureApart | None = None
    worst: tuple[FigureApart, ...] = ()
    wrong: int = 0
    said: str = ""
    seconds: float = 0.0
    precision: str = "float32"

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("differs", "broken")


@dataclass
class Certificate:
    """The contents of a certificate."""

    shrunk: Shrunk
    steps: int
    reference: Reference
    layouts: list[Examined]
    witnesses: list[Witness]
    resume: list[Witness] = field(default_factory=list)
    others: list[Witness] = field(default_factory=list)  # of the text and of the real size
    seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """The failures, a line each; empty if the run is certified."""
        found = [each.layout.name for each in self.layouts if each.is_wrong]
        kept = (*self.witnesses, *self.resume, *self.others)
        return found + [each.name for each in kept if each.holds is False]

    @property
    def unasked_mixing(self) -> list[str]:
        """The remark that the model mixes samples, if no layout here cuts the batch."""
        kept = (each for each in self.witnesses if each.name == APART)
        return [each.said for each in kept if each.holds is None]

    @property
    def is_certified(self) -> bool:
        """True if nothing is wrong, and at least one layout was compared."""
        return not self.wrong and any(each.verdict == "agrees" for each in self.layouts)


def certify(  # noqa: PLR0913 - what is asked of a certificate
    shrunk: Shrunk,
    layouts: Sequence[Layout],
    *,
    steps: int = 3,
    own: Own | None = None,
    resume: bool = True,
    budget: float = float("inf"),
    first: bool = False,
    say: Say = lambda _: None,
) -> Certificate:
    """Returns the certificate of a shrunk run on these layouts.

    `budget`: seconds after which no further layout begins. `first`: no further layout begins after
    one that is wrong. `own`: what replaces settings. `say` gets a line for each part when it is
    done. Raises UserError if the run does not train on one device, or if there are not enough
    devices.
    """
    start = time.monotonic()
    own = own or Own()
    _check_devices(layouts)
    reference = make_reference(shrunk.config, max(steps, 2), own)
    least, most = reference.spread()
    siblings = 4 if reference.mixes_samples else 5
    say(
        f"reference   one device, {len(reference.figures)} steps, {reference.leaves} figures; "
        f"rounding moves one by {least:.0e} to {most:.0e} of its size ({siblings} siblings)"
    )
    found = Certificate(shrunk, len(reference.figures), reference, [], [])
    found.witnesses = [samples_apart(reference, layouts), *witnesses(reference, own)]
    say(told("witnesses", found.witnesses))
    for line in found.unasked_mixing:
        say(f"{'':<11} {line}")
    for number, layout in enumerate(layouts):
        if time.monotonic() - start > budget or (first and found.wrong):
            found.layouts.append(Examined(layout, "not reached"))
            continue
        found.layouts.append(examine(reference, layout, own))
        say(line_of(number + 1, len(layouts), found.layouts[-1]))
    resume = resume and not (first and found.wrong)
    agreed = [each.layout for each in found.layouts if each.verdict == "agrees"]
    if resume and agreed:
        found.resume = resumed(shrunk.config, agreed, reference.states[-1], own)
        say(told("resume", found.resume))
    found.seconds = time.monotonic() - start
    return found


def _check_devices(layouts: Sequence[Layout]) -> None:
    most = max((layout.devices for layout in layouts), default=DEVICES)
    if jax.device_count() < most:
        raise ConfigError(
            f"the layouts take {most} devices",
            found=f"{jax.device_count()}",
            fix=f"--simulate-devices {most}",
        )


def examine(reference: Reference, layout: Layout, own: Own) -> Examined:
    """Compares a layout with the reference, step by step from the reference's own states."""
    start = time.monotonic()
    try:
        found = _compared(reference, layout, own)
    except UserError as error:
        return Examined(layout, "refused", said=str(error), seconds=time.monotonic() - start)
    except Exception as error:  # any error of a broken layout is what we look for
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Examined(layout, "broken", said=said, seconds=time.monotonic() - start)
    wrong = [each for each in found if each.is_wrong]
    largest = sorted(found, key=lambda each: -each.ratio)
    return Examined(
        layout,
        "differs" if wrong else "agrees",
        [each.ratio for each in largest],
        first_of(wrong) if wrong else largest[0],
        tuple(largest[:NAMED]),
        len(wrong),
        seconds=time.monotonic() - start,
    )


def _compared(reference: Reference, layout: Layout, own: Own) -> list[FigureApart]:
    config = with_settings(reference.stepper.setup.config, layout.overrides)
    stepper = Stepper(config, jax.devices()[: layout.devices], own)
    begun, want = without_step(stepper.begin()), reference.states[0]
    unlike = (
        str(leaf)
        for leaf, x in begun.items()
        if leaf not in want or not np.array_equal(x, want[leaf])
    )
    found = unequal(0, INITIAL, unlike)
    with stepper.batches() as ahead:
        for step, figures in enumerate(reference.figures):
            batch = next(ahead)
            if hash_of(stepper.setup, batch) != reference.hashes[step]:
                found += unequal(step, BATCH, ["samples"])
            _, got = stepper.take(reference.states[step], batch)
            found += differences(step, got, figures, reference.floors[step])
    return found


def line_of(number: int, count: int, found: Examined) -> str:
    place = f"{number:>2} of {count}"
    head = f"{place:<9} {found.layout.name:<58} {found.layout.why:<14}"
    if found.verdict == "agrees":
        worst = f"worst {found.ratios[0]:.1f} x rounding"
        return f"{head} agrees   {len(found.ratios)} figures, {worst}   {found.seconds:.1f} s"
    if found.first is not None:
        said = f"{found.first}; {found.wrong} of {len(found.ratios)} figures differ"
        return f"{head} DIFFERS  {said}"
    return f"{head} {found.verdict}  {found.said}"


def told(what: str, found: Sequence[Witness]) -> str:
    """Returns a line about some witnesses, and one more for each that fails."""
    asked = [each for each in found if each.holds is not None]
    holding = [each for each in asked if each.holds]
    skipped = len(found) - len(asked)
    rest = f" ({skipped} do not apply)" if skipped else ""
    lines = [f"{what:<11} {len(holding)} of {len(asked)} hold{rest}"]
    lines += [f"{'':<11} FAILS: {each.name}: {each.said}" for each in asked if not each.holds]
    return "\n".join(lines)


def values(found: Certificate) -> dict[str, Any]:
    """Returns the figures of a certificate as plain JSON values."""
    return {
        "certified": found.is_certified,
        "wrong": found.wrong,
        "steps": found.steps,
        "model": found.shrunk.words,
        "layouts": [_layout_values(each) for each in found.layouts],
        "witnesses": [vars(each) for each in found.witnesses],
        "resume": [vars(each) for each in found.resume],
        "others": [vars(each) for each in found.others],
        "reference": reference_values(found.reference),
        "not_tested": list(found.shrunk.lost),
        "seconds": round(found.seconds, 1),
    }


def _layout_values(found: Examined) -> dict[str, Any]:
    return {
        "name": found.layout.name,
        "settings": list(found.layout.settings),
        "why": found.layout.why,
        "verdict": found.verdict,
        "precision": found.precision,
        "figures": len(found.ratios),
        "worst": _finite(found.ratios[0]) if found.ratios else None,
        "wrong": found.wrong,
        "first": str(found.first) if found.first is not None else "",
        "said": found.said,
        "seconds": round(found.seconds, 1),
    }


def _finite(ratio: float) -> float:
    return min(ratio, 1e30)
