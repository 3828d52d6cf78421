"""`spmdtrain certify`: proves that every layout trains as one device does, or names one that does
not.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.cli.shared_arguments import (
    add_config,
    add_make,
    duration,
    positive_int,
    refuse_together,
    whole,
)
from spmdtrain.config import DONE, REFUSED, ConfigError, load, resolved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spmdtrain.config import RunConfig
    from spmdtrain.lab.certify.certify import Certificate
    from spmdtrain.lab.certify.cover import Layout
    from spmdtrain.lab.certify.shrink import Shrunk

SIMULATED = 8
# Halves the compile time; these programs need no speed.
CHEAPLY = "--xla_backend_optimization_level=0"


def add_certify(commands) -> None:
    """Adds the command `certify` and its arguments."""
    certify = commands.add_parser(
        "certify", help="prove that every layout trains what one device trains, leaf by leaf"
    )
    add_config(certify)
    add_make(certify)
    certify.add_argument(
        "--only-asked",
        action="store_true",
        help="only lay the model out over axes that the config uses",
    )
    certify.add_argument(
        "--layouts",
        metavar="FILE",
        help="file of layouts to compare instead, each a line of settings",
    )
    certify.add_argument(
        "--draw", type=positive_int, metavar="N", help="add N layouts drawn at random"
    )
    certify.add_argument("--seed", type=whole, default=0, metavar="S", help="seed of --draw")
    certify.add_argument(
        "--steps", type=positive_int, default=3, metavar="N", help="steps to compare, at least 2"
    )
    certify.add_argument(
        "--precision",
        choices=("float32", "asked"),
        default="float32",
        help="asked: also run the layouts in the precision of the config",
    )
    certify.add_argument("--no-resume", action="store_true", help="leave out the resumed run")
    certify.add_argument(
        "--as-is", action="store_true", help="keep the model and the sequences as they are"
    )
    certify.add_argument(
        "--budget",
        type=duration,
        metavar="SECONDS",
        help="time after which no further layout is begun",
    )
    certify.add_argument(
        "--first", action="store_true", help="stop at the first layout that is wrong"
    )
    certify.add_argument(
        "--hardware", metavar="NAME", help="also compile the real size for --devices of these GPUs"
    )
    certify.add_argument("--devices", type=positive_int, metavar="N", help="number of such GPUs")
    certify.add_argument(
        "--against", metavar="FILE", help="older certificate (.json) to compare the verdicts with"
    )
    certify.add_argument(
        "--out", metavar="DIR", default="certificates", help="folder for the page and the JSON"
    )
    certify.add_argument("--json", action="store_true", help="print JSON")
    certify.set_defaults(command=run_certify)


def run_certify(parsed: argparse.Namespace) -> int:
    """Writes and prints a certificate. Returns REFUSED if a layout trains differently."""
    refuse_together(parsed, "only_asked", "layouts")
    if (parsed.hardware is None) != (parsed.devices is None):
        raise ConfigError("--hardware and --devices go together", fix="--hardware h100 --devices 8")
    config = load(parsed.config, parsed.set)
    name = Path(parsed.config).stem
    page, document = (Path(parsed.out) / f"{name}.{kind}" for kind in ("html", "json"))
    Path(parsed.out).mkdir(parents=True, exist_ok=True)
    for file in (page, document):
        refuse_unwritable(file)
    _start(parsed)
    from spmdtrain.lab.certify import against
    from spmdtrain.lab.certify.certificate_page import not_proved
    from spmdtrain.lab.certify.certificate_page import page as as_page
    from spmdtrain.lab.certify.certify import values

    older = None if parsed.against is None else against.read(Path(parsed.against))
    certificate = _certified(parsed, config)
    facts = facts_of(config)
    answer = values(certificate) | {"not_proved": not_proved(certificate), "made_with": dict(facts)}
    changed = [] if older is None else against.changes(older, answer)
    answer["changed"] = changed
    page.write_text(as_page(certificate, name, facts), encoding="utf-8")
    text = json.dumps(answer, indent=1)
    document.write_text(text + "\n", encoding="utf-8")
    good = certificate.is_certified and not changed
    if parsed.json:
        print(text)
    else:
        for line in changed:
            print(f"{'changed':<11} {line}")
        digest = hashlib.sha256(document.read_bytes()).hexdigest()[:8]
        verdict = "certified" if good else "refused"
        why = (
            ""
            if certificate.is_certified
            else f"{', '.join(certificate.wrong) or 'nothing was compared'}; "
        )
        print(
            f"{verdict:<11} {why}{certificate.seconds:.0f} s; {page}, {document} (sha256 {digest})"
        )
    return DONE if good else REFUSED


def _start(parsed: argparse.Namespace) -> None:
    """Starts jax with simulated devices, and caches even programs that compile quickly."""
    parsed.simulate_devices = SIMULATED
    parsed.coordinator = parsed.processes = parsed.process = None
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {CHEAPLY}".strip()
    start_jax(parsed, alone=True)
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _certified(parsed: argparse.Namespace, config: "RunConfig") -> "Certificate":
    from spmdtrain.lab.certify.certify import certify, summary
    from spmdtrain.lab.certify.in_own_precision import add_narrow_gradients, add_own_precision
    from spmdtrain.lab.certify.shrink import shrink
    from spmdtrain.lab.certify.stepper import Own
    from spmdtrain.lab.certify.witnesses.real_size import real_size

    say = (lambda _: None) if parsed.json else (lambda line: print(line, flush=True))
    own = Own(make=parsed.make)
    shrunk = shrink(config, as_is=parsed.as_is)
    say(f"{Path(parsed.config).stem} as {shrunk.words}")
    layouts = _layouts(parsed, config, shrunk)
    certificate = certify(
        shrunk,
        layouts,
        steps=parsed.steps,
        own=own,
        resume=not parsed.no_resume,
        budget=float("inf") if parsed.budget is None else parsed.budget,
        first=parsed.first,
        say=say,
    )
    own_run = shrink(config, as_is=parsed.as_is, precision="asked")
    add_narrow_gradients(certificate, own_run, own, say)
    if parsed.precision == "asked":
        add_own_precision(certificate, own_run, own, say)
    if parsed.hardware is not None:
        real = real_size(parsed.config, parsed.set, parsed.hardware, parsed.devices)
        certificate.others += real
        say(summary("compiled", real))
    return certificate


def _layouts(
    parsed: argparse.Namespace, config: "RunConfig", shrunk: "Shrunk"
) -> "Sequence[Layout]":
    from spmdtrain.lab.certify.cover import cover, fitted, parse_layouts

    if parsed.layouts is None:
        layouts = fitted(cover(config, only_asked=parsed.only_asked), shrunk.config)
    else:
        try:
            layouts = parse_layouts(Path(parsed.layouts).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{parsed.layouts} cannot be read: {error}") from None
    if parsed.draw:
        from spmdtrain.lab.certify.drawn import draw_layouts

        layouts = [*layouts, *draw_layouts(shrunk.config, parsed.draw, parsed.seed)]
    if not layouts:
        raise ConfigError(f"{parsed.layouts} names no layout", fix="mesh.data=2 mesh.tensor=2")
    return layouts


def facts_of(config: "RunConfig") -> list[tuple[str, str]]:
    """Returns the facts behind a certificate: versions, the machine, and a hash of the settings.

    The hash is that of the resolved settings, without their origins.
    """
    import platform
    from importlib.metadata import version

    settings = json.dumps(resolved(config)["config"], sort_keys=True)
    names = ("spmdtrain", "jax", "jaxlib", "flax", "optax", "numpy")
    return [
        ("settings (sha256)", hashlib.sha256(settings.encode()).hexdigest()[:16]),
        ("python", platform.python_version()),
        *((name, version(name)) for name in names),
        ("machine", f"{platform.system()} {platform.machine()}, {SIMULATED} simulated devices"),
    ]
