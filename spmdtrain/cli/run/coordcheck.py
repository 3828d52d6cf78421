"""`spmdtrain coordcheck`: checks whether a model learns at the same pace in every width."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.shared_arguments import add_config, add_make, positive_int
from spmdtrain.config import DONE, REFUSED, load

if TYPE_CHECKING:
    from spmdtrain.config import RunConfig
    from spmdtrain.lab.certify.widths import CoordinateCheck, WidthFigures

TIMES = (1, 2, 4)  # as wide as the base, without --widths


def add_coordcheck(commands) -> None:
    """Adds the command `coordcheck` and its arguments."""
    check = commands.add_parser(
        "coordcheck", help="train some steps in several widths: do the logits change alike?"
    )
    add_config(check)
    add_make(check)
    check.add_argument(
        "--widths",
        type=_widths,
        metavar="A,B,C",
        help="values of model.embed (default: model.mup_base, twice and four times that)",
    )
    check.add_argument(
        "--steps", type=positive_int, default=8, metavar="N", help="steps in each width"
    )
    check.add_argument(
        "--simulate-devices", type=positive_int, metavar="N", help="simulate N devices on the CPU"
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(command=run_coordcheck)


def _widths(text: str) -> tuple[int, ...]:
    """Reads widths separated by commas."""
    return tuple(positive_int(width) for width in text.split(","))


def run_coordcheck(parsed: argparse.Namespace) -> int:
    """Prints how much some steps change the logits in each width.

    Returns REFUSED if the change depends on the width.
    """
    config = load(parsed.config, parsed.set)
    base = config.model.mup_base or config.model.embed
    widths = parsed.widths or tuple(base * times for times in TIMES)
    parsed.coordinator = parsed.processes = parsed.process = None
    start_jax(parsed, alone=True)
    import jax

    from spmdtrain.lab.certify.stepper import Own
    from spmdtrain.lab.certify.widths import coordinate_check

    def say(figures: "WidthFigures") -> None:
        if not parsed.json:
            kinds = ", ".join(f"{kind} {change:.4g}" for kind, change in figures.by_kind.items())
            print(
                f"width {figures.embed:<6} logits change by {figures.change:.4g} "
                f"({kinds}), loss {figures.loss:.4g}",
                flush=True,
            )

    check = coordinate_check(
        config, widths, parsed.steps, Own(make=parsed.make), jax.devices(), say
    )
    print(json.dumps(_values(check)) if parsed.json else _verdict(config, check))
    return DONE if check.is_good else REFUSED


def _values(check: "CoordinateCheck") -> dict[str, Any]:
    """Returns the values printed as JSON; a spread that is not finite is null."""
    from spmdtrain.lab.certify.widths import BOUND, BOUND_OF_KIND

    return {
        "widths": [
            {
                "embed": width.embed,
                "change": _finite(width.change),
                "by_kind": {kind: _finite(x) for kind, x in width.by_kind.items()},
                "loss": _finite(width.loss),
            }
            for width in check.widths
        ],
        "spread": _finite(check.spread),
        "spread_by_kind": {kind: _finite(x) for kind, x in check.spread_by_kind.items()},
        "bound": BOUND,
        "bound_of_kind": BOUND_OF_KIND,
        "good": check.is_good,
    }


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None


def _verdict(config: "RunConfig", check: "CoordinateCheck") -> str:
    """Returns the spreads and the verdict."""
    from spmdtrain.lab.certify.widths import BOUND, BOUND_OF_KIND

    kinds = ", ".join(f"{kind} {spread:.3g}" for kind, spread in check.spread_by_kind.items())
    spread = (
        f"spread       {check.spread:.3g}, at most {BOUND:g} "
        f"({kinds}; of matrices at most {BOUND_OF_KIND:g})"
    )
    if check.is_good:
        return f"{spread}\ngood         the logits change alike in every width"
    why = "model.mup_base is not set" if config.model.mup_base is None else "a multiplier is wrong"
    return f"{spread}\nrefused      the change depends on the width: {why}, or widths are too small"
