"""Examines the run in its own precision: its gradients against float32, its layouts, their sums."""

from dataclasses import replace

from spmdtrain.lab.certify.certify import Certificate, Say, examine, line_of, summary
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.noise import make_reference
from spmdtrain.lab.certify.shrink import Shrunk
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.witnesses.own_precision import is_narrow, narrow_gradients
from spmdtrain.lab.certify.witnesses.sum_precision import narrow_sums


def add_own_precision(certificate: Certificate, own_run: Shrunk, own: Own, say: Say) -> None:
    """Adds the layouts in the run's own precision to a certificate, with floors of their own."""
    if own_run.config.precision == certificate.shrunk.config.precision:
        say("precision   the run's own is float32: certified above")
        return
    chosen = [
        examined.layout
        for examined in certificate.layouts
        if examined.layout.why == "as configured"
    ]
    chosen = chosen or [certificate.layouts[0].layout]
    reference = make_reference(own_run.config, certificate.steps, own)
    for number, layout in enumerate(chosen):
        examined = examine(reference, layout, own)
        certificate.layouts.append(replace(examined, precision=own_run.config.precision.compute))
        say(line_of(number + 1, len(chosen), certificate.layouts[-1]))
    sums = [narrow_sums(own_run.config, layout, own) for layout in chosen]
    certificate.others += sums
    say(summary("sums", sums))


def add_narrow_gradients(certificate: Certificate, own_run: Shrunk, own: Own, say: Say) -> None:
    """Adds how far the run's own precision moves its gradients, on one device and as configured.

    Does nothing for a run in float32. A model that mixes the samples of a batch is checked on one
    device only, since it is another model elsewhere.
    """
    if not is_narrow(own_run.config.precision):
        return
    layouts = [Layout((), "one device")]
    if not certificate.reference.mixes_samples:
        agreed = [
            examined.layout for examined in certificate.layouts if examined.verdict == "agrees"
        ]
        configured = [layout for layout in agreed if layout.why == "as configured"]
        layouts += (configured or agreed)[:1]
    wide = certificate.shrunk.config
    made = [narrow_gradients(wide, own_run.config, layout, own) for layout in layouts]
    certificate.others += made
    say(summary("narrow", made))
    for witness in made:
        say(f"{'':<11} {witness.name}: {witness.details}")
