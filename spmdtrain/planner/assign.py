"""For one mesh: how each kind of layer uses the tensor axis and how activations lie between them, as a `[rules]` table.

PaSE (Elango, arXiv 2407.04001) picks a layout per layer by dynamic programming over the cost of the layers and of
resharding between them. A kind (attention; mlp; embedding and head, which share the axis "vocab") has three ways:
- split: weights over `tensor`. It takes its input whole and gives partial sums.
- whole: the same work on every device. Takes and gives whole activations.
- tokens: whole weights, each device its own part of `time`; gradients of weights are summed over `tensor`.

Between kinds the activations [batch, time, embed] are a stream: whole, or split over time or embed. The program walks
one layer of the loop with the stream as its state; memory is limited, so of each state it keeps all that no other one
beats in seconds and in bytes. `[rules]` has one name for a dim, wherever it is: one stream throughout, and beside time
over `tensor` nothing else is. What a stream that changes inside the layer would gain is found by the same program.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmdtrain.config.errors import ConfigError
from spmdtrain.planner.cost import half_work, vocabulary_work
from spmdtrain.planner.hardware import Hardware
from spmdtrain.planner.job import Job
from spmdtrain.planner.kernels import all_reduce, gather
from spmdtrain.planner.memory import SAFE, ours
from spmdtrain.planner.stack import Stack

TAKES = {"split": "whole", "whole": "whole", "tokens": "time"}  # way -> layout of its input, and of its gradient
GIVES = {"split": "partial", "whole": "whole", "tokens": "time"}  # of its output, and of its input's gradient
STREAMS = {"whole": {}, "embed": {"embed": ["tensor"]}, "time": {"time": ["context", "tensor"]}}  # activation rules
AXIS = {"attention": "kv_heads", "mlp": "ffn", "vocabulary": "vocab"}


@dataclass(frozen=True)
class Assignment:
    """`ways`: of each kind; `streams`: before and after attention. Seconds of a step in all kinds and between them;
    bytes more than with all kinds split and a whole stream."""

    ways: dict[str, str]
    streams: tuple[str, ...]
    seconds: float
    more_bytes: float

    @property
    def rules(self) -> dict[str, dict[str, list[str]]]:
        """The `[rules]` table: what differs from the default."""
        whole = {axis: [] for kind, axis in AXIS.items() if self.ways[kind] != "split"}
        return {"parameters": whole, "activations": whole | STREAMS[self.streams[0]]}

    def grown(self, kind: str, way: str, stream: str, seconds: float, more: float) -> "Assignment":
        ways, streams = self.ways | {kind: way}, (*self.streams, stream)
        return Assignment(ways, streams, self.seconds + seconds, self.more_bytes + more)

    def describe(self) -> dict[str, object]:
        found = {"ways": self.ways, "stream": self.streams[0], "rules": self.rules}
        return found | {"seconds": self.seconds, "more_bytes": self.more_bytes}


def assign(job: Job, device: Hardware, stack: Stack, *, by_rules: bool = True) -> list[Assignment]:
    """Assignments that fit, fastest first: those that no other one beats in both time and memory. `by_rules`: only what
    `[rules]` can say."""
    layout = job.layout
    if layout.tensor == 1:
        raise ConfigError("one device along mesh.tensor splits nothing", fix="--set mesh.tensor=8, say")
    streams = ["whole"] + ["embed"] * (job.shape.embed % layout.tensor == 0)
    streams += ["time"] * (job.sequence % (layout.context * layout.tensor) == 0)
    found = []
    for first in streams:  # that of the loop over layers, which ends as it began
        reached = [Assignment({}, (first,), 0.0, -saved(first, job))]
        for kind, after in (("vocabulary", [first]), ("attention", streams), ("mlp", [first])):
            grown = [
                each.grown(kind, way, stream, *cost_of(kind, way, (each.streams[-1], stream), job, device, stack))
                for each in reached
                for stream in after
                for way in TAKES
                if not by_rules or (stream == first and (way == "tokens") == (first == "time"))
            ]
            reached = [one for to in after for one in undominated([each for each in grown if each.streams[-1] == to])]
        found += [replace(each, streams=each.streams[1:3]) for each in reached]
    room = max(0.0, SAFE * device.memory - ours(job).total)
    return undominated([each for each in found if each.more_bytes <= room])


def undominated(found: Sequence[Assignment]) -> list[Assignment]:
    """Fastest first; of what is alike to nine digits, the leanest, and the default stream."""
    order = lambda each: (float(f"{each.seconds:.9g}"), each.more_bytes, each.streams != ("whole", "whole"))  # noqa: E731
    kept: list[Assignment] = []
    for each in sorted(found, key=order):
        if not kept or each.more_bytes < kept[-1].more_bytes:
            kept.append(each)
    return kept


def cost_of(
    kind: str, way: str, around: tuple[str, str], job: Job, device: Hardware, stack: Stack
) -> tuple[float, float]:
    """(seconds per step, bytes more per device than split) of a kind between the streams before and after it."""
    shape, layout, t = job.shape, job.layout, job.layout.tensor
    whole, tokens = replace(layout, tensor=1), replace(layout, tensor=1, context=layout.context * t)
    laid = replace(job, layout={"split": layout, "whole": whole, "tokens": tokens}[way])
    size = 4 if job.dtype == "float32" else 2
    wide = job.tokens * shape.embed * size
    (before, after), takes, gives = around, TAKES[way], GIVES[way]
    forward = sum(reshard(*pair, wide, t, device) for pair in ((before, takes), (gives, after)))
    backward = sum(reshard(*pair, wide, t, device) for pair in ((after, takes), (gives, before)))
    if kind == "vocabulary":  # nothing comes before the embedding or goes on after the head
        places, repeats, exposed = 1 / layout.pipeline, job.accumulation / layout.pipeline, 1.0
        elements = shape.vocab * shape.embed * (1 if shape.tied else 2)
        work = vocabulary_work(laid, device, stack) - 2 * all_reduce(wide, laid.layout.tensor, 1, device)
    else:
        places, repeats = job.layers_per_stage, job.accumulation * job.layers_per_stage
        matrices = shape.qkv_width + shape.attention_width if kind == "attention" else shape.up_width + shape.hidden
        elements, exposed = shape.embed * matrices, 1 - stack.tensor_overlap
        terms, again = half_work(kind, laid, device, stack, laid.layout.tensor), job.remat == "full"
        sums = terms["tensor_collectives"]
        work = sum(map(sum, terms.values())) - sum(sums) - again * sums[0]
        forward *= 1 + again
    if way == "tokens":
        work += all_reduce(size * elements, t, 1, device)
    per_weight = job.resting * (1 + job.moments / (layout.data if job.zero else 1)) + 4
    more = 0.0 if way == "split" else places * elements * (1 - 1 / t) / layout.fsdp * per_weight
    return repeats * (work + exposed * (forward + backward)), more


def reshard(one: str, other: str, moved: float, size: int, device: Hardware) -> float:
    """Seconds that activations of `moved` bytes, whole, take from one layout over `tensor` to another."""
    if one in (other, "whole"):  # a part of what is there is cut out
        return 0.0
    if (one, other) == ("partial", "whole"):
        return all_reduce(moved, size, 1, device)
    exchanged = moved / size if {one, other} == {"time", "embed"} else moved  # all-to-all: each sends its own part
    return gather(exchanged, size, 1, device)


def saved(stream: str, job: Job) -> float:
    """Bytes of activations that wait for their backward, less than with a whole stream."""
    layout, held = job.layout, ours(job).activations
    if stream == "time":
        alike = replace(layout, tensor=1, context=layout.context * layout.tensor)
        return held - ours(replace(job, layout=alike)).activations
    return (1 - 1 / layout.tensor) * held if stream == "embed" and job.remat == "full" else 0.0


def show(found: Sequence[Assignment], freely: Sequence[Assignment]) -> str:
    """A table, best first, and what to set. `freely`: what a stream that changes inside the layer would reach."""
    lines = [f"{'attention':<11}{'mlp':<8}{'vocabulary':<12}{'stream':<8}{'step':>12}{'more memory':>16}"]
    for each in found:
        ways = f"{each.ways['attention']:<11}{each.ways['mlp']:<8}{each.ways['vocabulary']:<12}{each.streams[0]:<8}"
        lines.append(f"{ways}{each.seconds:>10.4g} s{each.more_bytes / 1e9:>13.4g} GB")
    if freely[0].seconds < 0.99 * found[0].seconds:
        ways = ", ".join(f"{kind} {way}" for kind, way in freely[0].ways.items())
        lines += ["", f"beyond [rules]: {ways}, streams {' and '.join(freely[0].streams)}: {freely[0].seconds:.4g} s"]
    tables = {table: axes for table, axes in found[0].rules.items() if axes}
    for table, axes in tables.items():
        lines += ["", f"[rules.{table}]", *(f"{axis} = {json.dumps(over)}" for axis, over in axes.items())]
    return "\n".join(lines if tables else [*lines, "", "the default rules are best: nothing to set"])
