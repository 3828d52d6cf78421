"""Certifies tests/certified/base.toml up to the first thing that is wrong, and prints it as JSON.

    python -m tests.certified.worker [--among WORDS] [--only-resume] [KEY=VALUE ...]

The library is what PYTHONPATH names first: a broken copy. Compared are the layouts with
WORDS in their names. With --only-resume they are taken to agree, and the resumed run is tried.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdtrain.config import RunConfig
    from spmdtrain.lab.certify.cover import Layout

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", FLAGS)

BASE = Path(__file__).parent / "base.toml"
# Rules that no config here has: a dim split in another order than the mesh's, and one that an
# automatic axis splits too.
WITH_RULES = (
    "mesh.pipeline=2 mesh.fsdp=2 mesh.expert=2 train.microbatch=3 "
    "rules.parameters.embed=expert,fsdp",
    "mesh.pipeline=2 mesh.fsdp=2 mesh.tensor=2 train.microbatch=3 "
    "rules.parameters.vocab=tensor,fsdp rules.parameters.embed=",
)


def main(arguments: list[str]) -> None:
    """Imports the library only now: what jax reads of the environment is settled above."""
    import spmdtrain
    from spmdtrain.config import load
    from spmdtrain.lab.certify.certify import certify, values
    from spmdtrain.lab.certify.cover import cover, fitted, parse_layouts
    from spmdtrain.lab.certify.shrink import shrink

    parser = argparse.ArgumentParser()
    parser.add_argument("--among", default="")
    parser.add_argument("--only-resume", action="store_true")
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args(arguments)
    config = load(BASE, asked.settings)
    shrunk = shrink(config, as_is=True)
    layouts = [*fitted(cover(config), shrunk.config), *parse_layouts(WITH_RULES)]
    layouts = [layout for layout in layouts if asked.among in layout.name]
    try:
        if asked.only_resume:
            found = carried_on(shrunk.config, layouts)
        else:
            found = values(certify(shrunk, layouts, steps=2, first=True, resume=False))
    except Exception as error:  # a breakage may end the reference itself
        said = f"{type(error).__name__}: {str(error)[:300]}"
        found = {"certified": False, "wrong": [said], "ended": traceback.format_exc()[-1500:]}
    own = {"source": spmdtrain.__file__, "cpu_seconds": round(time.process_time(), 1)}
    print(json.dumps(found | own))


def carried_on(small: "RunConfig", layouts: "Sequence[Layout]") -> dict[str, Any]:
    """The part of a certificate that is about resuming, from a state with moments."""
    import jax

    from spmdtrain.lab.certify.stepper import Own, Stepper
    from spmdtrain.lab.certify.witnesses.resume import resumed

    stepper = Stepper(small, jax.devices()[:1], Own())
    with stepper.batches() as ahead:
        plain, _ = stepper.take(stepper.begin(), next(ahead))
    found = resumed(small, layouts, plain, Own())
    wrong = [each.name for each in found if not each.holds]
    return {"certified": not wrong, "wrong": wrong, "resume": [vars(each) for each in found]}


def drawn(
    count: int, seed: int, settings: Sequence[str] = (), known: Container[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yields the verdict on each of `count` layouts, drawn at random, of the library as it is.

    `settings`: those of the run, in addition to those of the file. Leaves out layouts whose names
    are `known`. Programs are forgotten on the way, or they would fill the memory.
    """
    import jax

    from spmdtrain.config import load
    from spmdtrain.lab.certify.certify import examine
    from spmdtrain.lab.certify.drawn import draw_layouts
    from spmdtrain.lab.certify.noise import make_reference
    from spmdtrain.lab.certify.shrink import shrink
    from spmdtrain.lab.certify.stepper import Own

    small = shrink(load(BASE, settings), as_is=True).config
    reference = make_reference(small, 2, Own())
    for number, layout in enumerate(draw_layouts(small, count, seed)):
        if (what := " ".join((f"{seed} {number}", *settings))) in known:
            continue
        start = time.process_time()
        found = examine(reference, layout, Own())
        if number % 20 == 19:
            jax.clear_caches()
        yield {
            "what": what,
            "layout": " ".join(layout.settings),
            "verdict": found.verdict,
            "worst": min(found.ratios[0], 1e30) if found.ratios else None,
            "first": str(found.first or found.details),
            "cpu_seconds": round(time.process_time() - start, 1),
        }


if __name__ == "__main__":
    main(sys.argv[1:])
