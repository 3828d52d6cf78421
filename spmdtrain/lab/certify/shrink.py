"""Shrinks a run for its certificate: the same blocks, rules and loss with small widths.

A pure function of the settings. Settings that decide which code runs stay (kinds of blocks,
patterns over the layers, ratios of heads, biases, tying, packing, dropout, the loss, the optimizer
and its groups, sharding rules); those that only decide how long it runs shrink. What this loses is
listed, so that a certificate can say what it does not prove.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.config import RunConfig, from_resolved
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema.model.layer_kinds import FIRST, repeated

WIDTH = 8  # channels of a head
HEADS = 4  # a ring of 4 divides them
EXPERTS = 8
LENGTH = 16  # tokens of a sequence: 4 parts of a ring, 2 of them on each
BATCH = 24  # divides by 8, by 6, and each of 8 shards in 3
STEPS = 6  # of the schedule of the learning rate; fewer are taken
MOST_LAYERS = 6
WHOLE_VOCAB, UNEVEN_VOCAB = 64, 67  # divided by a mesh, and padded
KERNELS_OF_GPUS = ("triton", "mosaic", "cudnn")
FLOAT32 = {
    "compute": "float32",
    "params": "float32",
    "frozen": None,
    "accumulate": "float32",
    "loss_scale": None,
    "loss_scale_steps": None,
}


@dataclass(frozen=True)
class Shrunk:
    """A shrunk run on one device. `lost` lists the parts of the real run that it does not test."""

    config: RunConfig
    lost: tuple[str, ...]

    @property
    def words(self) -> str:
        """The small model in a line."""
        model, train = self.config.model, self.config.train
        return (
            f"{model.layers} layers, {model.heads} of {model.kv_heads} heads, "
            f"width {model.embed}, vocabulary {model.vocab}, "
            f"{train.global_batch} x {train.sequence_length} tokens"
        )


def shrink(config: RunConfig, *, as_is: bool = False, precision: str = "float32") -> Shrunk:
    """Returns the shrunk run. `as_is` keeps the model and the sequences unchanged.

    `precision` is "float32", or "asked" for the run's own. Raises ConfigError for a run that cannot
    be certified, and if the small settings do not fit together.
    """
    if config.train.learns_pairs:
        raise ConfigError(
            f"train.preference={config.train.preference!r} learns from pairs of answers, which a "
            "certificate cannot examine",
            fix="--set train.preference=none",
        )
    values = config.as_given()
    lost: list[str] = []
    if not as_is:
        values["model"] |= _model(config, lost)
        values["train"]["sequence_length"] = LENGTH
    elif config.model.vocab is None:
        values["model"]["vocab"] = UNEVEN_VOCAB
    values["train"] |= _train(config)
    if config.train.stages:
        values["optimizer"]["rate_by_batch"] = "none"
        lost.append("train.stages, the smaller batches and shorter sequences of the first steps")
    values["optimizer"]["warmup"] = min(config.optimizer.warmup, 2)
    values["data"] |= _data(config, lost)
    values["own"] = _own(config, lost)
    values["mesh"] |= dict.fromkeys(config.mesh.sizes, 1) | {"collective_matmul": False}
    values["pipeline"] = {}
    values["kernels"] = {"tune": "off"}
    for section in type(config).model_fields:
        if text := getattr(config, section).lost_in_small_runs():
            values[section] = {}
            lost.append(text)
    values["eval"] = {"every": 0}
    values["checkpoint"] = {"every": 0}
    values["log"] = {}
    values["guard"] |= {"replica_check": 0}
    if config.guard.policy == "rollback":
        values["guard"]["policy"] = "skip"
        lost.append("a run that goes back to a checkpoint by itself")
    is_wide = precision == "float32"
    values["precision"] = FLOAT32 if is_wide else config.precision.as_given()
    if config.finetune.has_adapters:
        values["finetune"]["rank"] = min(config.finetune.rank, 4)
    if config.finetune.frozen_layers:
        values["finetune"]["frozen_layers"] = 1
    if config.pipeline.is_file:
        lost.append(f"the schedule of {config.pipeline.schedule}, whose sizes are those of the run")
    small = from_resolved({"config": values, "origin": {}})
    if not as_is and _is_one_stack(config) and not _is_one_stack(small):
        values["model"] |= _two_rounds(config, lost)
        small = from_resolved({"config": values, "origin": {}})
    return Shrunk(small, tuple(lost))


def _train(config: RunConfig) -> dict[str, Any]:
    """Returns [train] for one device; layouts set microbatches, recomputation and ZeRO."""
    return {
        "steps": STEPS,
        "epochs": None,
        "global_batch": BATCH,
        "microbatch": None,
        "stages": (),
        "remat": "none",
        "zero": 0,
        "init_from": None,
        "seed": config.train.seed,
    }


def _data(config: RunConfig, lost: list[str]) -> dict[str, Any]:
    data = config.data
    if data.mix:
        lost.append("the mixture of sources, and its loss by source")
    if data.corpus != "synthetic":
        lost.append(f"the data themselves: certified on synthetic ones, packing {data.packing}")
    return {
        "corpus": "synthetic",
        "path": None,
        "validation_path": None,
        "mix": (),
        "phases": (),
        "tokenizer": "bytes",
        "dtype": None,
    }


def _own(config: RunConfig, lost: list[str]) -> dict[str, Any]:
    """Returns [own] without data, and without sinks and hooks, which do not affect training."""
    if config.own.data is not None:
        lost.append(f"the data of own.data={config.own.data}: certified on synthetic ones")
    parts = {name: getattr(config.own, name) for name in ("optimizer", "learning_rate", "loss")}
    arguments = {
        part: settings for part, settings in config.own.arguments.items() if parts.get(part)
    }
    return parts | {"arguments": arguments}


def _model(config: RunConfig, lost: list[str]) -> dict[str, Any]:
    """Returns the settings of [model] that become smaller."""
    model = config.model
    ratio = model.heads // model.kv_heads
    shared = model.kv_heads == 1 and model.heads > 1
    kv_heads = 1 if shared else HEADS
    heads = HEADS if kv_heads == 1 else HEADS * min(ratio, 2)
    width = _width(config)
    # With muP it decides how the scale of the scores follows the width.
    keeps_heads = model.mup_base is not None and model.is_given("head_dim")
    own_width = model.heads * model.head_dim != model.embed
    embed = HEADS * width // 2 if own_width else heads * width
    of_layers = _sharing_layers(config, embed, lost) or _layer_patterns(config, lost)
    windows = of_layers["windows"]
    small: dict[str, Any] = of_layers | {
        "embed": embed,
        "heads": heads,
        "kv_heads": kv_heads if kv_heads != heads or model.is_given("kv_heads") else None,
        "head_dim": width if own_width or keeps_heads else None,
        "mup_base": model.mup_base and max(1, round(embed / model.width_factor)),
        "ffn": _ffn(config, embed),
        "vocab": _vocab(config),
        "max_length": 2 * LENGTH if model.is_given("max_length") else None,
        "rope_theta_window": model.rope_theta_window if any(windows) else None,
    }
    if model.experts is not None:
        small["experts"] = _experts(config, embed, lost)
    if model.latent is not None:
        small |= {"kv_heads": None, "head_dim": None, "latent": _latent(config)}
    small |= _mixers(config) | _pattern(config)
    if model.token_layers is not None:
        small["token_layers"] = {"dim": WIDTH // 2}
    if model.full is not None:
        small["full"] = _full(config, width, kv_heads, windows, lost)
    if model.temperature is not None:
        length = round(model.temperature.length * LENGTH / config.train.sequence_length)
        small["temperature"] = model.temperature.as_given() | {"length": max(1, length)}
    if model.attention in KERNELS_OF_GPUS:
        lost.append(f"model.attention={model.attention}, a kernel of GPUs: XLA's in its place")
        small["attention"] = "auto"
    if model.rope_scaling and model.rope_scaling.divisors:
        lost.append("model.rope_scaling, a list of the real width")
        small["rope_scaling"] = None
    return small


def _full(
    config: RunConfig, width: int, kv_heads: int, windows: Sequence[int], lost: list[str]
) -> dict[str, Any] | None:
    """Returns the shrunk settings of [model.full]: heads of twice the width."""
    full = config.model.full
    assert full is not None, "the caller checks"
    if windows and all(windows):
        lost.append("[model.full]: the first layers without a window come later")
        return None
    return full.as_given() | {
        "head_dim": 2 * width if full.head_dim else None,
        "kv_heads": kv_heads if full.kv_heads else None,
    }


def _width(config: RunConfig) -> int:
    """Returns the smallest head width that leaves an even number of rotated channels."""
    share = config.model.rope_share
    widths = (WIDTH * n for n in (1, 2, 4, 8))
    return next((w for w in widths if int(w * share) and int(w * share) % 2 == 0), 8 * WIDTH)


def _layers(config: RunConfig, lost: list[str]) -> int:
    """Returns four layers, or three if the real stages and chunks are uneven or one.

    A pattern over the layers stays whole if it fits, as far as the real layers go.
    """
    model = config.model
    places = max(config.mesh.pipeline, 1) * config.pipeline.chunks
    pattern = _pattern(config)
    if pattern:
        return len(pattern["mixers"])
    patterns = (model.windows, model.chunks, model.rope_layers, model.mixers, model.mlps)
    period = min(max(1, *map(len, patterns)), model.layers)
    layers = 3 if places == 1 or model.layers % places else 4
    if period > MOST_LAYERS:
        lost.append(f"a pattern of {period} layers beyond its first {MOST_LAYERS}")
    layers = min(max(layers, period), MOST_LAYERS)
    if model.experts is None:
        return layers
    every, dense = min(model.experts.every, 2), min(model.experts.first_dense, 1)
    return layers + (dense - layers) % every


def _layer_patterns(config: RunConfig, lost: list[str]) -> dict[str, Any]:
    """Returns the number of layers, and the patterns over them."""
    model = config.model
    return {
        "layers": _layers(config, lost),
        "windows": _spans(config, model.windows[: model.layers], "window", lost),
        "chunks": _spans(config, model.chunks[: model.layers], "block", lost),
        "rope_layers": model.rope_layers[: model.layers],
    }


def _sharing_layers(config: RunConfig, embed: int, lost: list[str]) -> dict[str, Any]:
    """Returns the same where the last layers share keys, else nothing.

    Of each kind two layers have keys and one shares them: those of the second.
    """
    model = config.model
    if not model.shared_keys:
        return {}
    kinds = list(enumerate(model.layer_kinds))
    first = model.layers - model.shared_keys
    own = list({kind: number for number, kind in kinds[:first]}.values())
    sharing = list({kind: number for number, kind in kinds[first:]}.values())
    places = [*own, *own, *sharing]

    def in_places(pattern: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(pattern[place % len(pattern)] for place in places) if pattern else ()

    return {
        "layers": len(places),
        "shared_keys": len(sharing),
        "shared_ffn": _narrowed(config, model.shared_ffn, embed) if model.shared_ffn else None,
        "windows": _spans(config, in_places(model.windows), "window", lost),
        "chunks": _spans(config, in_places(model.chunks), "block", lost),
        "rope_layers": in_places(model.rope_layers),
    }


def _pattern(config: RunConfig) -> dict[str, Any]:
    """Returns [model]'s patterns of mixers and mlps with each kind of layer once, if the first few
    layers do not have them all; else nothing.
    """
    model = config.model
    mlps = model.layer_mlps if model.mlps else ("mlp",) * model.layers
    parts = list(zip(model.layer_mixers, mlps, strict=True))
    kinds = list(dict.fromkeys(parts))
    if len(kinds) == len(set(parts[:MOST_LAYERS])):
        return {}
    pattern = {"mixers": [mixer for mixer, _ in kinds]}
    return pattern | ({"mlps": [mlp for _, mlp in kinds]} if model.mlps else {})


def _is_one_stack(config: RunConfig) -> bool:
    """Returns True if one round repeats over all layers but first dense ones: pipelines need it."""
    model = config.model
    return not model.shared_keys and sum(stack.path != FIRST for stack in model.stacks) == 1


def _two_rounds(config: RunConfig, lost: list[str]) -> dict[str, Any]:
    """Returns [model]'s patterns of two rounds with each kind of layer once."""
    model, stack = config.model, config.model.stacks[-1]
    lost.append(f"a round of {len(stack.pattern)} layers: of each kind of layer one")
    dense = min(stack.first, 1)
    once = [stack.first + stack.pattern.index(parts) for parts in dict.fromkeys(stack.pattern)]
    places = [*range(dense), *once, *once]
    patterns: dict[str, Any] = {"layers": len(places)}
    if model.mixers:
        patterns["mixers"] = [model.layer_mixers[place] for place in places]
    if model.mlps:
        patterns["mlps"] = [model.layer_mlps[place] for place in places]
    if model.full is not None:
        windows = repeated(model.windows, model.layers)
        patterns["windows"] = _spans(config, [windows[place] for place in places], "window", lost)
    return patterns


def _ffn(config: RunConfig, embed: int) -> int | None:
    return _narrowed(config, config.model.ffn, embed) if config.model.is_given("ffn") else None


def _narrowed(config: RunConfig, width: int, embed: int) -> int:
    """Returns a width of an mlp in proportion to that of the stream, in eights."""
    return max(8, round(width / config.model.embed * embed / 8) * 8)


def _experts(config: RunConfig, embed: int, lost: list[str]) -> dict[str, Any]:
    """Returns the shrunk settings of [model.experts]: 8 experts, or 2 in each of 4 groups."""
    experts = config.model.experts
    assert experts is not None, "the caller checks"
    groups = min(experts.groups, 4)
    groups_kept = max(min(experts.groups_kept, groups), 1)
    if experts.groups_kept < experts.groups:
        groups_kept = min(groups_kept, groups - 1)
    if experts.balance_over != "sequence":
        lost.append("a balance over the microbatch, which is another in each layout: by sequence")

    return experts.as_given() | {
        "count": EXPERTS,
        "chosen": min(experts.chosen, 2),
        "ffn": _narrowed(config, experts.ffn, embed) if experts.is_given("ffn") else None,
        "shared_ffn": _narrowed(config, experts.shared_ffn, embed) if experts.shared_ffn else None,
        "width": _narrowed(config, experts.width, embed) if experts.width else None,
        "groups": groups,
        "groups_kept": groups_kept if experts.is_given("groups_kept") else None,
        "first_dense": min(experts.first_dense, 1),
        "every": min(experts.every, 2),
        "balance_over": "sequence",
    }


def _latent(config: RunConfig) -> dict[str, Any]:
    """Returns the shrunk settings of [model.latent], with a different value for each width."""
    latent = config.model.latent
    assert latent is not None, "the caller checks"
    sizes = {"rank": 2 * WIDTH, "plain_dim": WIDTH, "rope_dim": WIDTH // 2, "value_dim": WIDTH - 2}
    return sizes | {"query_rank": 3 * WIDTH if latent.query_rank else None}


def _mixers(config: RunConfig) -> dict[str, Any]:
    """Returns the shrunk tables of mixers, with a different value for each width."""
    model = config.model
    tables: dict[str, Any] = {}
    if model.delta is not None:
        sizes = {"key_heads": HEADS, "value_heads": HEADS * min(model.delta.group, 2)}
        sizes |= {"key_dim": WIDTH, "value_dim": WIDTH - 2}
        ranks = {name: 4 for name in ("decay_rank", "gate_rank") if getattr(model.delta, name)}
        tables["delta"] = model.delta.as_given() | sizes | ranks
    if model.ssd is not None:
        groups = HEADS if model.ssd.groups > 1 else 1
        sizes = {"heads": HEADS * min(model.ssd.group, 2), "groups": groups}
        tables["ssd"] = model.ssd.as_given() | sizes | {"head_dim": WIDTH, "state": WIDTH - 2}
    return tables


def _vocab(config: RunConfig) -> int:
    """Returns a vocabulary that meshes divide if the real mesh divides the real one."""
    mesh, vocab = config.mesh, config.model.vocab
    ways = abs(mesh.tensor) * abs(mesh.pipeline)
    return WHOLE_VOCAB if vocab and ways > 1 and vocab % ways == 0 else UNEVEN_VOCAB


def _spans(config: RunConfig, spans: Sequence[int], what: str, lost: list[str]) -> tuple[int, ...]:
    """Returns windows or blocks, scaled like the sequences; one as long as a sequence stays so."""
    length = config.train.sequence_length

    def small(span: int) -> int:
        if span >= length:
            lost.append(f"a {what} of {span}: it is longer than the sequence")
            return LENGTH
        return min(max(round(span * LENGTH / length), 3), LENGTH - 1) if span else 0

    return tuple(small(span) for span in spans)
