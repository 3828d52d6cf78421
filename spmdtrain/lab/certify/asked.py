"""Examines the run in its own precision: its gradients against those of float32, the layouts as
configured, and the width of their sums.
"""

from dataclasses import replace

from spmdtrain.lab.certify.certify import Certificate, Say, examine, line_of, told
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.noise import make_reference
from spmdtrain.lab.certify.shrink import Shrunk
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.witnesses.exchanged import narrow_sums
from spmdtrain.lab.certify.witnesses.own_precision import is_narrow, narrow_gradients


def in_asked_precision(found: Certificate, asked: Shrunk, own: Own, say: Say) -> None:
    """Adds the results in the run's own precision to a certificate, with a separate noise floor."""
    if asked.config.precision == found.shrunk.config.precision:
        say("precision   the run's own is float32: certified above")
        return
    chosen = [each.layout for each in found.layouts if each.layout.why == "as configured"]
    chosen = chosen or [found.layouts[0].layout]
    reference = make_reference(asked.config, found.steps, own)
    for number, layout in enumerate(chosen):
        examined = examine(reference, layout, own)
        found.layouts.append(replace(examined, precision=asked.config.precision.compute))
        say(line_of(number + 1, len(chosen), found.layouts[-1]))
    sums = [narrow_sums(asked.config, layout, own) for layout in chosen]
    found.others += sums
    say(told("sums", sums))


def against_float32(found: Certificate, asked: Shrunk, own: Own, say: Say) -> None:
    """Adds what the run's own precision does to its gradients, on one device and as configured.

    It does nothing for a run in float32. A model that mixes the samples of a batch is left on one
    device: elsewhere it is another model.
    """
    if not is_narrow(asked.config.precision):
        return
    layouts = [Layout((), "one device")]
    if not found.reference.mixes_samples:
        agreed = [each.layout for each in found.layouts if each.verdict == "agrees"]
        configured = [layout for layout in agreed if layout.why == "as configured"]
        layouts += (configured or agreed)[:1]
    wide = found.shrunk.config
    made = [narrow_gradients(wide, asked.config, layout, own) for layout in layouts]
    found.others += made
    say(told("narrow", made))
    for witness in made:
        say(f"{'':<11} {witness.name}: {witness.said}")
