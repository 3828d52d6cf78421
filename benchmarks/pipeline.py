"""A pipeline's memory and step time: our schedules against `jax.vjp` of a loop over ticks
(pipeline_baselines.py).

All programs are gradient functions of the same GPT, from the same weights and microbatches to the
same gradients: this is checked before anything is measured. On 8 simulated CPU devices, float32;
every number of microbatches is a program of its own.

Memory is what XLA plans for temporaries on each device, weights and gradients not among them: it
needs no run. Time is measured in rounds, every program of the same rematerialisation once in each,
in the opposite order the next time; what counts is the ratio within a round. Simulated devices
share the cores of this machine: it shows how much work a step is, idle stages computing along, but
neither the time that messages take nor what overlaps. Where other programs run, the ratio of the
processor time, all threads together, is the calmer one.

Another mesh of eight: --set mesh.data=1 --set mesh.tensor=2.

    make bench-pipeline, or
    python benchmarks/pipeline.py [--microbatches N ...] [--set model.embed=256] [--json FILE]
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax, which reads them once
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from overhead import Spent, add_common_arguments, publish, spread
from pipeline_baselines import make_gradients, whole_vocabulary

from spmdtrain.compiled.step_memory import memory_of
from spmdtrain.config.errors import ConfigError, UserError
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.config.schema import GPT, MeshConfig, PipelineConfig, RunConfig, TrainConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.parallel.axes import batch_shards
from spmdtrain.parallel.mesh import build_mesh
from spmdtrain.train.all_parts import parts_of
from spmdtrain.train.batch import batch_sharding
from spmdtrain.train.gradients import grad_pipeline
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard_on
from spmdtrain.train.state import parameter_specs

# Largest ratio interleaved / circular of the temporaries, full, at 32 microbatches.
MEMORY_LIMIT = 0.5
TIME_LIMIT = 1.10  # and of the step times, full
FLAT_LIMIT = 1.02  # largest ratio of our own temporaries over all numbers of microbatches
GRADIENT_TOLERANCE = 1e-5  # float32: of a leaf's largest difference to its largest value

CONFIG = RunConfig(
    model=GPT(layers=8, embed=128, heads=4, vocab=512),
    train=TrainConfig(microbatch=4, sequence_length=128),
    mesh=MeshConfig(pipeline=4, data=2),
    pipeline=PipelineConfig(schedule="interleaved", chunks=2),
)
REMATS = ("none", "dots", "full")
OURS = ("1f1b", "interleaved")
GPIPE, CIRCULAR, GROUPS = "gpipe scan", "circular scan", "circular scan, in groups"
RACE = ("interleaved", CIRCULAR, GROUPS)


@dataclass(frozen=True)
class Variant:
    kind: str
    chunks: int
    remat: str

    def __str__(self) -> str:
        return f"{self.kind}, v={self.chunks}, {self.remat}"


def programs(chunks: int, remats: Sequence[str]) -> list[Variant]:
    kinds = {"1f1b": 1, "interleaved": chunks, GPIPE: 1, CIRCULAR: chunks, GROUPS: chunks}
    every = [Variant(kind, v, remat) for kind, v in kinds.items() for remat in remats]
    return [program for program in every if (program.kind, program.remat) != (GPIPE, "dots")]


# --- one program ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A program for some number of microbatches. `run()` gives (gradients by path, sums) of the
    same values always.
    """

    executable: jax.stages.Compiled
    model: AbstractModel
    arguments: Callable[[], tuple]

    @property
    def temp_bytes(self) -> int:
        """On one device."""
        return memory_of(self.executable).temp_bytes


Build = Callable[[Variant, int], Built]


def build(config: RunConfig, program: Variant, microbatches: int) -> Built:
    schedule = program.kind if program.kind in OURS else "interleaved"
    mesh = build_mesh(config.mesh, where=config.origin)
    shards = batch_shards(mesh.shape)
    batch_size = microbatches * config.train.microbatch * shards
    train = config.train.model_copy(update={"remat": program.remat, "global_batch": batch_size})
    pipeline = PipelineConfig(schedule=schedule, chunks=program.chunks)
    config = config.model_copy(update={"train": train, "pipeline": pipeline})
    setup = shard_on(config, mesh)
    rules, model = setup.rules, setup.model
    if program.kind in OURS:
        gradients = _gradients_of_step(setup)
    else:
        rules = whole_vocabulary(rules)
        gradients = make_gradients(setup, rules, groups=program.kind == GROUPS)
    specs = {
        path: NamedSharding(mesh, spec) for path, spec in parameter_specs(model, rules).items()
    }
    start = jax.jit(model.init, out_shardings=specs)
    host = random_batch(config, microbatches, shards)
    places = {name: batch_sharding(mesh, rules, name) for name in host}

    weights = jax.eval_shape(start, jax.random.key(0))
    weights = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=specs[path])
        for path, x in weights.items()
    }
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name])
        for name, x in host.items()
    }
    executable = jax.jit(gradients).lower(weights, jnp.int32(0), batch).compile()
    return Built(
        executable,
        model,
        lambda: (start(jax.random.key(0)), jnp.int32(0), jax.device_put(host, places)),
    )


def _gradients_of_step(setup: Setup) -> Callable[..., Any]:
    find = grad_pipeline.make_gradients(setup, parts_of(setup.config))
    return lambda params, step, batch: find(params, StepInputs(step, batch))[:2]


def random_batch(config: RunConfig, microbatches: int, shards: int) -> dict[str, np.ndarray]:
    """Random tokens, a tenth of them not counted."""
    asked, random = config.train, np.random.default_rng(0)
    shape = (microbatches, asked.microbatch * shards, asked.sequence_length)
    tokens, targets = random.integers(0, config.model.vocab, (2, *shape), dtype=np.int32)
    sample = np.arange(math.prod(shape[:2]), dtype=np.uint32).reshape(shape[:2])
    return {
        "tokens": tokens,
        "targets": targets,
        "mask": np.float32(random.random(shape) < 0.9),
        "sample": sample,
    }


def by_layer(built: Built, gradients: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Gradients as a model without stages has them."""
    return {
        path: np.asarray(built.model.stage_layout.unstaged(g) if built.model.in_stack(path) else g)
        for path, g in gradients.items()
    }


# --- what is measured -----------------------------------------------------------------------------


def gradient_difference(build: Build, every: Sequence[Variant], microbatches: int) -> float:
    """The largest over all programs and leaves, against the first program."""
    first, worst = None, 0.0
    for program in every:
        built = build(program, microbatches)
        found = by_layer(built, built.executable(*built.arguments())[0])
        first = first or found
        worst = float(
            np.max(
                [worst, *(abs(found[path] - g).max() / abs(g).max() for path, g in first.items())]
            )
        )
        assert worst <= GRADIENT_TOLERANCE, (
            f"{program}: gradients differ by {worst:.1e} from {every[0]}"
        )
    return worst


def race(
    build: Build, every: Sequence[Variant], microbatches: int, rounds: int
) -> dict[str, list[Spent]]:
    """What each step took, by program; one more, not among them, warms up."""
    built = {str(program): build(program, microbatches) for program in every}
    arguments = {name: each.arguments() for name, each in built.items()}
    seen: dict[str, list[Spent]] = {name: [] for name in built}
    for number in range(rounds + 1):
        for name in [*built][:: 1 if number % 2 else -1]:
            start = Spent.so_far()
            jax.block_until_ready(built[name].executable(*arguments[name]))
            seen[name].append(start.per_step(1))
    return {name: spent[1:] for name, spent in seen.items()}


def ratios(of: Sequence[Spent], to: Sequence[Spent]) -> dict[str, float]:
    """Median and quartiles of the ratios of time, and the median of those of processor time, round
    by round.
    """
    cpu = spread([a.cpu / b.cpu for a, b in zip(of, to, strict=True)])["median"]
    return spread([a.wall / b.wall for a, b in zip(of, to, strict=True)]) | {"cpu": cpu}


def figures(
    config: RunConfig, numbers: Sequence[int], timed: int, rounds: int, remats: Sequence[str]
) -> dict:
    stages = config.mesh.pipeline
    if stages < 2:
        raise ConfigError(
            "a pipeline has several stages", asked=f"mesh.pipeline={stages}", fix="mesh.pipeline=4"
        )
    if uneven := [number for number in (*numbers, timed) if number % stages]:
        asked = f"{uneven[0]} with mesh.pipeline={stages}"
        raise ConfigError(
            "stages must divide the microbatches", asked=asked, fix=f"a multiple of {stages}"
        )
    once, every = cache(partial(build, config)), programs(config.pipeline.chunks, remats)
    result: dict[str, Any] = {
        "largest_gradient_difference": gradient_difference(once, every, min(numbers))
    }
    result["temp_bytes"] = {
        str(program): {number: once(program, number).temp_bytes for number in numbers}
        for program in every
    }
    result["seconds"], result["ratios"], result["load"] = {}, {}, {}
    for remat in remats:
        ours, *others = [
            program for program in every if program.kind in RACE and program.remat == remat
        ]
        seen = race(once, [ours, *others], timed, rounds)
        result["seconds"] |= {
            name: spread([spent.wall for spent in spents]) for name, spents in seen.items()
        }
        result["ratios"] |= {
            f"{ours} / {other}": ratios(seen[str(ours)], seen[str(other)]) for other in others
        }
        result["load"][remat] = os.getloadavg()[0]
    return result | {
        "microbatches_timed": timed,
        "rounds": rounds,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "mesh": {axis: size for axis, size in config.mesh.sizes.items() if size > 1},
        "model": config.model.model_dump(),
        "sequences_per_microbatch_and_shard": config.train.microbatch,
        "sequence_length": config.train.sequence_length,
    }


def verdicts(result: dict[str, Any], chunks: int) -> list[str]:
    """One line for each limit that was measured."""
    said = []

    def compare(what: str, ratio: float, limit: float) -> None:
        said.append(f"{what}: {ratio:.3f}, {'within' if ratio <= limit else 'ABOVE'} {limit}")

    temp, ours = result["temp_bytes"], str(Variant("interleaved", chunks, "full"))
    for kind in (CIRCULAR, GROUPS):
        other = str(Variant(kind, chunks, "full"))
        if 32 in temp.get(ours, ()):
            compare(
                f"temporaries at m=32, {ours} / {other}",
                temp[ours][32] / temp[other][32],
                MEMORY_LIMIT,
            )
        if ours in temp:
            compare(
                f"step time, {ours} / {other}",
                result["ratios"][f"{ours} / {other}"]["median"],
                TIME_LIMIT,
            )
    growth = [
        max(sizes.values()) / min(sizes.values())
        for name, sizes in temp.items()
        if name.startswith(OURS)
    ]
    compare(
        "our temporaries, largest / smallest over all m, the worst of our programs",
        max(growth),
        FLAT_LIMIT,
    )
    return said


def table(result: dict[str, Any], chunks: int) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    numbers = sorted({number for sizes in result["temp_bytes"].values() for number in sizes})
    lines = [f"temporaries, KiB per device, on {mesh}, for m microbatches"]
    lines += [f"{'':36}" + "".join(f"{f'm={number}':>10}" for number in numbers)]
    for name, sizes in result["temp_bytes"].items():
        lines.append(f"{name:36}" + "".join(f"{sizes[number] // 1024:>10}" for number in numbers))
    title = f"seconds per step, m={result['microbatches_timed']}"
    lines += ["", f"{title:36}{'median':>10}{'quartiles':>18}{'fastest':>10}"]
    for name, seen in result["seconds"].items():
        quartiles = f"{seen['low']:.2f} to {seen['high']:.2f}"
        lines.append(f"{name:36}{seen['median']:>10.2f}{quartiles:>18}{seen['fastest']:>10.2f}")
    title = f"ratio of step times, {result['rounds']} rounds"
    lines += ["", f"{title:60}{'median':>10}{'quartiles':>18}{'cpu':>10}"]
    for name, seen in result["ratios"].items():
        quartiles = f"{seen['low']:.3f} to {seen['high']:.3f}"
        lines.append(f"{name:60}{seen['median']:>10.3f}{quartiles:>18}{seen['cpu']:>10.3f}")
    load = ", ".join(f"{load:.1f} after {remat}" for remat, load in result["load"].items())
    difference = (
        f"gradients agree within {result['largest_gradient_difference']:.1e} of a leaf's largest"
    )
    return "\n".join(
        [
            *lines,
            "",
            *verdicts(result, chunks),
            f"{difference}; load {load} on {result['cores']} cores",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    several = {"nargs": "+", "metavar": "M", "type": int}
    parser.add_argument(
        "--microbatches", default=[8, 16, 32, 64], **several, help="of the memory table"
    )
    parser.add_argument(
        "--timed", type=int, default=16, metavar="M", help="microbatches of a step that is timed"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of each race (default: %(default)s)")
    parser.add_argument(
        "--remat", nargs="+", choices=REMATS, default=REMATS, help="default: all of them"
    )
    add_common_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        config = from_resolved(resolved(CONFIG), parsed.set)
        result = figures(config, parsed.microbatches, parsed.timed, parsed.rounds, parsed.remat)
    except UserError as error:
        sys.exit(str(error))
    publish(table(result, config.pipeline.chunks), result, parsed.json)


if __name__ == "__main__":
    main()
