"""A draw: what one seed stands for. Settings that decide the numbers, a layout, and what happens
to the run.

Seeds in a row share their numbers, so that one run on one device answers for all of them, and a few
layouts, each of which is compiled once: as where a run begins, and as where another goes on. A draw
depends on its seed and on this room alone, never on what the trainer says, so that a seed stays
what it was while faults are mended.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fuzz import schedule_files
from fuzz.kinds_of_models import draw_model, with_model
from fuzz.settings import (
    BASE,
    BASE_FILE,
    DEFAULT,
    NOT_DRAWN,
    OF_MIXERS,
    OF_WHOLE_MODELS,
    TABLES,
    Values,
    class_of,
    is_layout,
    names,
    of_table,
    overrides,
    required,
    values_of,
)
from spmdtrain.config import ConfigError, RunConfig, load
from spmdtrain.config.schema import MeshConfig
from spmdtrain.lab.certify.drawn_rules import ACTIVATIONS, draw_rules, legal, sizes_of
from spmdtrain.parallel.axes import ACTIVATION_RULES

AXES = tuple(MeshConfig().sizes)
BATCH = ("data", "fsdp", "expert")
LAYOUTS_PER_NUMBERS = 8
CHANGES_PER_NUMBERS = 2
SEEDS_PER_NUMBERS = 24
SET = 0.4  # how often a setting is not left at its default
OF_SHARED = tuple(f"model.experts.{name}" for name in ("shared_ffn", "shared_gate", "own_norms"))
ALWAYS = ("train.steps", "eval.every")
TABLE = 0.15  # how often a run has one of the tables
OF_A_FAMILY = 0.25  # how often [model] is one of kinds_of_models.py
MIXED = 0.2  # how often layers have other mixers than attention
UNCHECKED = 0.04  # share of draws that may well be refused: the refusal is what is tested
TRIES = 200
PROFILED = 0.06  # a trace takes seconds
TOKEN_FILE = "runs/fuzz/tokens.bin"  # below the repository, made by the campaign
TOKENS_OF = ("LICENSE", "CONTRIBUTING.md", "constraints.txt")
DEVICES = (8,) * 9 + (4,) * 5 + (2,) * 3 + (6, 6, 3, 5, 7, 1)
ON_ONE_AXIS = 0.15  # share of meshes that have all devices on one axis
FROM_FILE = 0.15  # share of pipelines whose schedule is a file
ENDS = ("moved",) * 4 + ("changed",) * 3 + ("same",) * 2 + ("whole", "begun")
# Settings that a person changes on the way are changed more often than the rest.
CHANGED_OFTEN = (
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.name",
    "optimizer.schedule",
    "model.bias",
    "model.tied",
    "model.dropout",
    "model.norm_epsilon",
    "model.rope_theta",
    "precision.compute",
    "precision.params",
    "precision.accumulate",
    "train.steps",
    "train.clip",
    "train.seed",
)


@dataclass(frozen=True)
class Draw:
    """`end`: whole | same (stopped, goes on in the layout) | moved (goes on in `onto`) |
    changed (in `onto` with `change`) | begun (another run begins in `onto`, with its weights).
    `stop`: the step at which it is stopped, `by` kill or term.
    """

    seed: int
    numbers: Values
    layout: Values
    end: str = "whole"
    stop: int = 1
    by: str = "kill"
    onto: Values = field(default_factory=dict)
    change: Values = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def draw(seed: int) -> Draw:
    group, place = divmod(seed, SEEDS_PER_NUMBERS)
    numbers = numbers_of(group)

    def layout(at: int) -> Values:
        compiled = layout_of(group, at, numbers)
        return compiled | draw_habits(random.Random(f"habits {seed}"))

    fate = random.Random(f"fate {seed}")
    steps = numbers.get("train.steps", BASE["train.steps"])
    drawn = Draw(
        seed,
        numbers,
        layout(place % LAYOUTS_PER_NUMBERS),
        end=fate.choice(ENDS),
        stop=fate.randrange(1, steps),
        by=fate.choice(("kill", "term")),
    )
    other = fate.randrange(LAYOUTS_PER_NUMBERS)
    if drawn.end in ("moved", "begun"):
        return replace(drawn, onto=layout(other))
    if drawn.end == "changed":
        which = fate.randrange(CHANGES_PER_NUMBERS)
        change = draw_change(random.Random(f"change {group} {which}"), numbers)
        return replace(drawn, onto=layout(which), change=change)
    return drawn


def numbers_of(group: int) -> Values:
    numbers = draw_numbers(random.Random(f"numbers {group}"))
    of_family = random.Random(f"family {group}")
    if of_family.random() < OF_A_FAMILY:
        whole = with_model(numbers, draw_model(of_family))
        return whole if config_of(whole) else numbers
    mixed = _with_mixers(random.Random(f"mixers {group}"), numbers)
    return mixed if config_of(mixed) else numbers


def layout_of(group: int, at: int, numbers: Values) -> Values:
    """One of the layouts that a group of seeds shares."""
    return draw_layout(random.Random(f"layout {group} {at}"), numbers)


# --- numbers --------------------------------------------------------------------------------------


def draw_numbers(random: random.Random) -> Values:
    """Settings that decide the numbers of a run; mostly such as the schema accepts."""
    unchecked = random.random() < UNCHECKED
    for _ in range(TRIES):
        drawn = _numbers(random)
        if unchecked or config_of(drawn):
            return drawn
    return {}


def _numbers(random: random.Random) -> Values:
    model = random.choice(names("model"))
    optimizer = random.choice(names("optimizer"))
    drawn: Values = {"model.name": model, "optimizer.name": optimizer}
    for key in number_keys(model, optimizer):
        if key not in drawn and random.random() < (1 if key in ALWAYS else SET):
            drawn[key] = random.choice(values_of(key))
    for table, others in TABLES.items():
        if random.random() < TABLE:
            drawn |= _table(random, table) | others
    drawn = {key: value for key, value in drawn.items() if value is not DEFAULT}
    return _of_a_kind(random, drawn)


def _table(random: random.Random, table: str) -> Values:
    """What a run says of one of the tables, with all that has no default."""
    always = required(table)
    return {
        key: random.choice(values_of(key))
        for key in of_table(table)
        if key not in (*NOT_DRAWN, *OF_WHOLE_MODELS) and not is_layout(key)
        if key in always or random.random() < SET
    }


def _with_mixers(random: random.Random, numbers: Values) -> Values:
    """Sometimes with a pattern of mixers, and the tables that it asks for."""
    if random.random() > MIXED:
        return numbers
    mixers = random.choice(values_of("model.mixers"))
    layers = random.choice((1, 1, 2)) * len(mixers)
    drawn: Values = {"model.mixers": mixers, "model.layers": layers}
    if random.random() < SET:
        drawn["model.mlps"] = random.choice(values_of("model.mlps"))
    needed = [*mixers, "ssd"] if "both" in mixers else mixers
    for mixer in dict.fromkeys(needed):
        if mixer in OF_MIXERS:
            drawn |= _table(random, OF_MIXERS[mixer])
    return numbers | drawn


def number_keys(model: str, optimizer: str) -> Iterator[str]:
    """Dotted names of what decides numbers, for these classes of the two sections that have
    several.
    """
    for section, kind in RunConfig.model_fields.items():
        chosen = {"model": model, "optimizer": optimizer}.get(section)
        fields = (class_of(section, chosen) if chosen else type(kind.default)).model_fields
        for name in fields:
            key = f"{section}.{name}"
            others = ("model.mixers", "model.mlps", *OF_MIXERS.values(), *OF_WHOLE_MODELS)
            if not (is_layout(key) or key in (*others, *NOT_DRAWN, *TABLES)):
                yield key


def _of_a_kind(random: random.Random, drawn: Values) -> Values:
    """What only fits together: a corpus with its path, its vocabulary, and how much of it is
    evaluated.
    """
    drawn = dict(drawn)
    corpus = drawn.get("data.corpus", BASE["data.corpus"])
    if corpus in ("synthetic", "stdlib"):
        drawn.pop("data.path", None)
        # All of it takes minutes.
        drawn.setdefault("eval.batches", random.choice(values_of("eval.batches")))
    else:
        drawn["data.path"] = random.choice(values_of("data.path"))
    if corpus == "tokens":
        drawn["data.path"] = TOKEN_FILE
        drawn.pop("data.tokenizer", None)
    if corpus == "text":
        drawn.setdefault("eval.batches", random.choice(values_of("eval.batches")))
    if corpus != "synthetic" and random.random() > UNCHECKED:
        drawn["model.vocab"] = None  # as the tokenizer has
    if drawn.get("data.validation_fraction") == 0.0 and random.random() > UNCHECKED:
        drawn["eval.every"] = 0
    if not drawn["eval.every"] and random.random() > UNCHECKED:
        drawn.pop("eval.at_start", None)
    return _with_sparsity(random, _with_shared(random, drawn))


def _with_shared(random: random.Random, drawn: Values) -> Values:
    """A width and a gate only where there are shared experts, and there often."""
    if random.random() < UNCHECKED:
        return drawn
    if drawn.get("model.experts.shared"):
        return {key: random.choice(values_of(key)) for key in OF_SHARED} | drawn
    return {key: x for key, x in drawn.items() if key not in OF_SHARED}


def _with_sparsity(random: random.Random, drawn: Values) -> Values:
    """Nothing but its pattern where a run chooses no weights, and no share without magnitude."""
    if random.random() < UNCHECKED:
        return drawn
    pattern = drawn.get("sparsity.pattern", "none")
    if pattern == "magnitude":
        drawn.setdefault("sparsity.share", random.choice(values_of("sparsity.share")))
    idle = [] if pattern == "magnitude" else ["share"]
    idle += ["since", "until", "every"] if pattern == "none" else []
    return {key: x for key, x in drawn.items() if key.removeprefix("sparsity.") not in idle}


def config_of(values: Values) -> RunConfig | None:
    """What the schema makes of these settings; None where it refuses them."""
    try:
        return load(BASE_FILE, overrides(values))
    except ConfigError:
        return None


# --- layout ---------------------------------------------------------------------------------------


def draw_layout(random: random.Random, numbers: Values) -> Values:
    """Mesh, rules, schedule and the like for a run of these numbers. `fill` names an axis that
    is typed as -1.
    """
    config = config_of(numbers)
    unchecked = config is None or random.random() < UNCHECKED
    config = config or load(BASE_FILE)
    mesh = _draw_mesh(random, config, unchecked)
    drawn: Values = {f"mesh.{axis}": size for axis, size in mesh.items() if size > 1}
    if random.random() < 0.1:
        drawn["fill"] = random.choice(AXES)
    drawn |= _turns(random, config, mesh, unchecked)
    drawn |= draw_rules(random, config, mesh, unchecked)
    for key in ("model.attention", "train.zero"):
        if random.random() < SET:
            drawn[key] = random.choice(values_of(key))
    longer = mesh["tensor"] > 1 and random.random() < SET
    if longer and (stream := _stream_over_tensor(config, mesh, drawn)):
        drawn["rules.activations.stream_time"] = stream
        drawn["mesh.collective_matmul"] = random.choice(values_of("mesh.collective_matmul"))
    if config.model.experts is not None and random.random() < SET:
        drawn["model.experts.bucket_factor"] = random.choice(
            values_of("model.experts.bucket_factor")
        )
    if mesh["context"] > 1 and random.random() < SET:
        drawn["model.context_attention"] = random.choice(values_of("model.context_attention"))
    return drawn


def _stream_over_tensor(
    config: RunConfig, mesh: Mapping[str, int], drawn: Values
) -> tuple[str, ...]:
    """Axes of the stream's tokens with `tensor` as the last one; none where it cannot be."""
    base = ACTIVATION_RULES.items()
    table = {name: drawn.get(f"rules.activations.{name}", axes) for name, axes in base}
    table["stream_time"] = (*table["time"], "tensor")
    return table["stream_time"] if legal(table, ACTIVATIONS, sizes_of(config), mesh) else ()


def draw_habits(random: random.Random) -> Values:
    """What a layout may have besides, and no compiled program depends on."""
    drawn: Values = {}
    for key in ("checkpoint.every", "checkpoint.keep", "log.every"):
        if random.random() < SET:
            drawn[key] = random.choice(values_of(key))
    if random.random() < PROFILED:
        drawn["log.profile"] = random.choice(values_of("log.profile"))
    return drawn


def _draw_mesh(random: random.Random, config: RunConfig, unchecked: bool) -> dict[str, int]:
    """Sizes of the six axes that split batch and time evenly."""
    for _ in range(TRIES):
        mesh = dict.fromkeys(AXES, 1)
        one = [random.choice(AXES)]
        among = one if random.random() < ON_ONE_AXIS else AXES
        for prime in _primes(random.choice(DEVICES)):
            mesh[random.choice(among)] *= prime
        batch = config.train.global_batch % math.prod(mesh[axis] for axis in BATCH)
        time = config.train.sequence_length % mesh["context"]
        if unchecked or (batch == 0 and time == 0):
            return mesh
    return dict.fromkeys(AXES, 1)


def _primes(number: int) -> list[int]:
    found = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return found


def _turns(
    random: random.Random, config: RunConfig, mesh: Mapping[str, int], unchecked: bool
) -> Values:
    """Microbatch, schedule, chunks and remat, which only fit together."""
    for _ in range(TRIES):
        drawn: Values = {"train.microbatch": random.choice(values_of("train.microbatch"))}
        remat = random.choice(values_of("train.remat"))
        is_refused = remat == "offload" and mesh["pipeline"] > 1 and not unchecked
        drawn["train.remat"] = "full" if is_refused else remat
        drawn["train.scan_layers"] = mesh["pipeline"] > 1 or random.choice((True, False, "auto"))
        if mesh["pipeline"] > 1 or random.random() < UNCHECKED:
            drawn["pipeline.schedule"] = random.choice(values_of("pipeline.schedule"))
            drawn["pipeline.chunks"] = random.choice(values_of("pipeline.chunks"))
            if mesh["pipeline"] > 1 and random.random() < FROM_FILE:
                drawn["pipeline.schedule"] = _schedule_file(random, drawn, config, mesh)
        if unchecked or _take_turns(drawn, config, mesh):
            return {key: value for key, value in drawn.items() if value is not None}
    return {}


def _schedule_file(
    random: random.Random, drawn: Values, config: RunConfig, mesh: Mapping[str, int]
) -> str:
    """A random schedule of these sizes."""
    shard, microbatch = _cut(drawn, config, mesh)
    return schedule_files.name(
        random.randrange(1000),
        mesh["pipeline"],
        drawn["pipeline.chunks"],
        max(shard // microbatch, 1),
        split=drawn["train.remat"] == "none" and random.random() < 0.5,
    )


def _cut(drawn: Values, config: RunConfig, mesh: Mapping[str, int]) -> tuple[int, int]:
    """Sequences of a shard of the batch, and of a microbatch."""
    shard = config.train.global_batch // math.prod(mesh[axis] for axis in BATCH)
    return shard, drawn["train.microbatch"] or max(shard, 1)


def _take_turns(drawn: Values, config: RunConfig, mesh: Mapping[str, int]) -> bool:
    shard, microbatch = _cut(drawn, config, mesh)
    if shard % microbatch:
        return False
    schedule = drawn.get("pipeline.schedule", "1f1b")
    if schedule.endswith(".csv"):
        return True
    chunks = drawn.get("pipeline.chunks", 1)
    if chunks > 1 and (schedule in ("gpipe", "1f1b") or shard // microbatch % mesh["pipeline"]):
        return False
    return schedule != "zero_bubble" or drawn["train.remat"] == "none"


# --- what changes on the way ----------------------------------------------------------------------


def draw_change(random: random.Random, numbers: Values) -> Values:
    """One setting or two that a person changes before going on; {} where chance finds none
    that the schema takes.
    """
    for _ in range(TRIES):
        model = numbers.get("model.name", "gpt")
        optimizer = numbers.get("optimizer.name", "adamw")
        keys = [*number_keys(model, optimizer), *CHANGED_OFTEN * 3]
        change = {
            key: random.choice(values_of(key))
            for key in random.sample(keys, random.choice((1, 1, 1, 2)))
        }
        change.pop("data.path", None)
        changed = after(numbers, change)
        before, now = config_of(numbers), config_of(changed)
        if not before or not now or before.model_dump() == now.model_dump():
            continue
        if now.train.steps >= before.train.steps:
            return change
    return {}


def after(numbers: Values, change: Values) -> Values:
    """The numbers once they are changed; settings of a class that is left go with it."""
    changed = numbers | change
    for section in ("model", "optimizer"):
        chosen = changed.get(f"{section}.name")
        if chosen:
            known = class_of(section, chosen).model_fields
            changed = {
                key: value
                for key, value in changed.items()
                if not key.startswith(f"{section}.") or key.split(".")[1] in known
            }
    return changed


def settings_of(numbers: Values, layout: Values) -> tuple[Values, int]:
    """(all settings of a run, how many devices it takes)."""
    values = numbers | layout
    fill = values.pop("fill", None)
    devices = math.prod(values.get(f"mesh.{axis}", 1) for axis in AXES)
    if fill:
        values[f"mesh.{fill}"] = -1
    return values, devices


ONE_DEVICE: Values = {"checkpoint.every": 0}  # the layout that answers for all others
