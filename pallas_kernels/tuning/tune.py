"""`tune`: measures the calls that the table does not know, and remembers them."""

from collections.abc import Callable, Iterable

from pallas_kernels.calls import Call
from pallas_kernels.tuning.measure import Finding, Process, measure
from pallas_kernels.tuning.table import Table


def tune(
    calls: Iterable[Call],
    table: Table,
    say: Callable[[str], None] = print,
    *,
    gpu: str | None = None,
    again: bool = False,
    program: str | None = None,
    process: Process | None = None,
) -> list[Finding]:
    """Measures the calls that the table does not know, adds them to it, and returns the findings.

    Args:
      gpu: jax's name of the GPU, if known: calls that the table knows on it are not measured.
      again: also measure calls that are known.
      program: a digest under which the table remembers that a program has these calls.
    """
    by_name = {call.name: call for call in calls}

    def is_known(gpu: str, call: Call) -> bool:
        return not again and table.entry(gpu, call.name) is not None

    def is_known_on(real: str, call: Call) -> bool:
        nonlocal gpu
        gpu = real  # whatever name the driver has for it
        return is_known(real, call)

    unknown = [call for call in by_name.values() if gpu is None or not is_known(gpu, call)]
    findings = []
    for machine, finding in measure(unknown, say, process, is_known_on):
        findings.append(finding)
        gpu = machine.get("gpu", gpu)
        if gpu is not None and finding.chosen is not None:
            _remember(table, gpu, {finding.call.name: finding.document()}, {}, say)
    if gpu is not None and program is not None:
        _remember(table, gpu, {}, {program: list(by_name)}, say)
    return findings


def _remember(table, gpu, entries, programs, say) -> None:
    try:
        table.add(gpu, entries, programs)
    except OSError as error:
        say(f"kernels: {table.path} cannot be written: {error.strerror}")
