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
NAMED = 6  # differences that a layout records, in addition to the first


@dataclass(frozen=True)
class Examined:
    """A layout compared with the reference.

    `ratios` has the distance of every figure in floors, largest first, and `worst` the figures with
    the largest. `first` is the figure that differs first within the step; if none does, the one
    with the largest ratio. `details` says why the layout was refused, or how it broke. `precision`
    is float32, or that of the run.
    """

    layout: Layout
    verdict: Verdict
    ratios: list[float] = field(default_factory=list)
    first: FigureApart | None = None
    worst: tuple[FigureApart, ...] = ()
    wrong: int = 0
    details: str = ""
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
        """The names of the layouts and witnesses that fail; empty if the run is certified."""
        wrong = [examined.layout.name for examined in self.layouts if examined.is_wrong]
        all_witnesses = (*self.witnesses, *self.resume, *self.others)
        return wrong + [witness.name for witness in all_witnesses if witness.holds is False]

    @property
    def mixing_remarks(self) -> list[str]:
        """The remark that the model mixes samples, if no layout cuts the batch."""
        mixing = (witness for witness in self.witnesses if witness.name == APART)
        return [witness.details for witness in mixing if witness.holds is None]

    @property
    def is_certified(self) -> bool:
        """True if nothing is wrong, and at least one layout was compared."""
        return not self.wrong and any(examined.verdict == "agrees" for examined in self.layouts)


def certify(  # noqa: PLR0913 - the options of a certificate
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

    No layout is started after `budget` seconds, nor, with `first`, after one that is wrong. `own`
    holds the parts that replace settings. `say` is called with a line as soon as a part is done.
    Raises UserError if the run does not train on one device, or if there are too few devices.
    """
    start = time.monotonic()
    own = own or Own()
    _check_devices(layouts)
    reference = make_reference(shrunk.config, max(steps, 2), own)
    smallest, largest = reference.spread()
    siblings = 4 if reference.mixes_samples else 5
    say(
        f"reference   one device, {len(reference.figures)} steps, {reference.leaves} figures; "
        f"rounding moves one by {smallest:.0e} to {largest:.0e} of its size ({siblings} siblings)"
    )
    certificate = Certificate(shrunk, len(reference.figures), reference, [], [])
    certificate.witnesses = [samples_apart(reference, layouts), *witnesses(reference, own)]
    say(summary("witnesses", certificate.witnesses))
    for line in certificate.mixing_remarks:
        say(f"{'':<11} {line}")
    for number, layout in enumerate(layouts):
        if time.monotonic() - start > budget or (first and certificate.wrong):
            certificate.layouts.append(Examined(layout, "not reached"))
            continue
        certificate.layouts.append(examine(reference, layout, own))
        say(line_of(number + 1, len(layouts), certificate.layouts[-1]))
    resume = resume and not (first and certificate.wrong)
    agreed = [examined.layout for examined in certificate.layouts if examined.verdict == "agrees"]
    if resume and agreed:
        certificate.resume = resumed(shrunk.config, agreed, reference.states[-1], own)
        say(summary("resume", certificate.resume))
    certificate.seconds = time.monotonic() - start
    return certificate


def _check_devices(layouts: Sequence[Layout]) -> None:
    needed = max((layout.devices for layout in layouts), default=DEVICES)
    if jax.device_count() < needed:
        raise ConfigError(
            f"the layouts take {needed} devices",
            found=f"{jax.device_count()}",
            fix=f"--simulate-devices {needed}",
        )


def examine(reference: Reference, layout: Layout, own: Own) -> Examined:
    """Compares a layout with the reference, step by step from the reference's own states."""
    start = time.monotonic()
    try:
        compared = _compared(reference, layout, own)
    except UserError as error:
        return Examined(layout, "refused", details=str(error), seconds=time.monotonic() - start)
    except Exception as error:  # whatever breaks a layout is a result
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Examined(layout, "broken", details=message, seconds=time.monotonic() - start)
    wrong = [figure for figure in compared if figure.is_wrong]
    largest = sorted(compared, key=lambda figure: -figure.ratio)
    return Examined(
        layout,
        "differs" if wrong else "agrees",
        [figure.ratio for figure in largest],
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
    figures_apart = unequal(0, INITIAL, unlike)
    with stepper.batches() as ahead:
        for step, figures in enumerate(reference.figures):
            batch = next(ahead)
            if hash_of(stepper.setup, batch) != reference.hashes[step]:
                figures_apart += unequal(step, BATCH, ["samples"])
            _, got = stepper.take(reference.states[step], batch)
            figures_apart += differences(step, got, figures, reference.floors[step])
    return figures_apart


def line_of(number: int, count: int, examined: Examined) -> str:
    place = f"{number:>2} of {count}"
    head = f"{place:<9} {examined.layout.name:<58} {examined.layout.why:<14}"
    if examined.verdict == "agrees":
        worst = f"worst {examined.ratios[0]:.1f} x rounding"
        return f"{head} agrees   {len(examined.ratios)} figures, {worst}   {examined.seconds:.1f} s"
    if examined.first is not None:
        details = f"{examined.first}; {examined.wrong} of {len(examined.ratios)} figures differ"
        return f"{head} DIFFERS  {details}"
    return f"{head} {examined.verdict}  {examined.details}"


def summary(what: str, witnesses: Sequence[Witness]) -> str:
    """Returns a line that counts the witnesses that hold, and one more for each that fails."""
    applying = [witness for witness in witnesses if witness.holds is not None]
    holding = [witness for witness in applying if witness.holds]
    skipped = len(witnesses) - len(applying)
    rest = f" ({skipped} do not apply)" if skipped else ""
    lines = [f"{what:<11} {len(holding)} of {len(applying)} hold{rest}"]
    lines += [
        f"{'':<11} FAILS: {witness.name}: {witness.details}"
        for witness in applying
        if not witness.holds
    ]
    return "\n".join(lines)


def values(certificate: Certificate) -> dict[str, Any]:
    """Returns the figures of a certificate as plain JSON values."""
    return {
        "certified": certificate.is_certified,
        "wrong": certificate.wrong,
        "steps": certificate.steps,
        "model": certificate.shrunk.words,
        "layouts": [_layout_values(examined) for examined in certificate.layouts],
        "witnesses": [_witness_values(witness) for witness in certificate.witnesses],
        "resume": [_witness_values(witness) for witness in certificate.resume],
        "others": [_witness_values(witness) for witness in certificate.others],
        "reference": reference_values(certificate.reference),
        "not_tested": list(certificate.shrunk.lost),
        "seconds": round(certificate.seconds, 1),
    }


def _layout_values(examined: Examined) -> dict[str, Any]:
    return {
        "name": examined.layout.name,
        "settings": list(examined.layout.settings),
        "why": examined.layout.why,
        "verdict": examined.verdict,
        "precision": examined.precision,
        "figures": len(examined.ratios),
        "worst": _finite(examined.ratios[0]) if examined.ratios else None,
        "wrong": examined.wrong,
        "first": str(examined.first) if examined.first is not None else "",
        "said": examined.details,
        "seconds": round(examined.seconds, 1),
    }


def _witness_values(witness: Witness) -> dict[str, Any]:
    return {"name": witness.name, "holds": witness.holds, "said": witness.details}


def _finite(ratio: float) -> float:
    return min(ratio, 1e30)
