"""For one mesh: which layer kinds the tensor axis should split, as a table for `[rules]`.

PaSE (Elango, arXiv 2407.04001) picks a layout per layer by dynamic programming over the cost of the layers and of
resharding between them. Here the residual stream has one layout, whatever the kinds on both sides do, so an edge costs
what its kind's own sums over `tensor` cost and states are few: a kind is split over `tensor` or whole. The embedding
and the head share the logical axis "vocab", hence their choice. What remains is a choice per kind under one limit, the
memory, which the program below carries as its state.
"""

from dataclasses import dataclass, replace

from spmdtrain.config.errors import ConfigError
from spmdtrain.planner.cost import HALVES, half_work, vocabulary_work
from spmdtrain.planner.hardware import Hardware
from spmdtrain.planner.job import Job
from spmdtrain.planner.memory import SAFE, ours
from spmdtrain.planner.stack import Stack

KINDS = (*HALVES, "vocabulary")
WHOLE = {  # what `[rules]` says of a kind that is not split
    "attention": ("rules.parameters.kv_heads=", "rules.activations.kv_heads="),
    "mlp": ("rules.parameters.ffn=", "rules.activations.ffn="),
    "vocabulary": ("rules.parameters.vocab=", "rules.activations.vocab="),
}


@dataclass(frozen=True)
class Assignment:
    """`split`: the kinds split over `tensor`. Seconds of a step in all kinds; bytes more than with all kinds split."""

    split: frozenset[str]
    seconds: float
    more_bytes: float

    @property
    def settings(self) -> list[str]:
        return [setting for kind in KINDS if kind not in self.split for setting in WHOLE[kind]]

    def describe(self) -> dict[str, object]:
        more = {"seconds": self.seconds, "more_bytes": self.more_bytes}
        return {"split": [kind for kind in KINDS if kind in self.split], "settings": self.settings} | more


def assign(job: Job, device: Hardware, stack: Stack) -> list[Assignment]:
    """Assignments that fit, fastest first: those that no other one beats in both time and memory."""
    if job.layout.tensor == 1:
        raise ConfigError("one device along mesh.tensor splits nothing", fix="--set mesh.tensor=8, say")
    room = SAFE * device.memory - ours(job).total
    reached = [Assignment(frozenset(), 0.0, 0.0)]
    for kind in KINDS:
        split, whole = choices(kind, job, device, stack)
        grown = [
            Assignment(each.split | {kind}, each.seconds + split, each.more_bytes)
            if chosen
            else Assignment(each.split, each.seconds + whole[0], each.more_bytes + whole[1])
            for each in reached
            for chosen in (True, False)
        ]
        reached = _undominated([each for each in grown if each.more_bytes <= max(0.0, room)])
    return reached


def _undominated(found: list[Assignment]) -> list[Assignment]:
    kept: list[Assignment] = []
    for each in sorted(found, key=lambda each: (each.seconds, each.more_bytes)):
        if not kept or each.more_bytes < kept[-1].more_bytes:
            kept.append(each)
    return kept


def choices(kind: str, job: Job, device: Hardware, stack: Stack) -> tuple[float, tuple[float, float]]:
    """Seconds per step of the kind split, and (seconds, bytes more per device) of it whole."""
    shape, t = job.shape, job.layout.tensor
    if kind == "vocabulary":
        alone = replace(job, layout=replace(job.layout, tensor=1))
        ways = job.layout.pipeline
        seconds = [job.accumulation * vocabulary_work(each, device, stack) / ways for each in (job, alone)]
        elements = shape.vocab * shape.embed * (1 if shape.tied else 2) / ways
    else:
        repeats = job.accumulation * job.layers_per_stage
        works = [half_work(kind, job, device, stack, ways) for ways in (t, 1)]
        seconds = [repeats * sum(map(sum, work.values())) for work in works]
        matrices = shape.qkv_width + shape.attention_width if kind == "attention" else shape.up_width + shape.hidden
        elements = job.layers_per_stage * shape.embed * matrices
    more = elements * (1 - 1 / t) / job.layout.fsdp
    moments = job.moments / (job.layout.data if job.zero else 1)
    return seconds[0], (seconds[1], more * (job.resting * (1 + moments) + 4))


def show(found: list[Assignment]) -> str:
    lines = [f"{'kinds over tensor':<32}{'step':>12}{'more memory':>14}"]
    for each in found:
        split = ", ".join(kind for kind in KINDS if kind in each.split) or "none"
        lines.append(f"{split:<32}{each.seconds:>10.4g} s{each.more_bytes / 1e9:>11.4g} GB")
    pasted = " ".join(f"--set {setting}" for setting in found[0].settings)
    return "\n".join([*lines, "", pasted or "the default rules are best: nothing to set"])
