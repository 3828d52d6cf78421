"""Finds the best use of the tensor axis, as a `[rules]` table: `spmdtrain plan --rules`.

PaSE (Elango, arXiv 2407.04001) picks a layout per layer by dynamic programming over the cost of
the layers and of resharding between them. There are three kinds of layer: attention, MLP, and
vocabulary (embedding and head, which share the logical axis "vocab"). Each can use `tensor` in one
of three ways:

- "split": weights are split. Takes its input whole and gives partial sums.
- "whole": every device does the same work. Takes and gives whole activations.
- "tokens": weights are whole, and each device has its own part of time. Gradients of weights are
  summed over `tensor`.

Between the kinds, the activations [batch, time, embed] are a *stream*: whole, or split over time or
embed. The dynamic program walks one layer, with the stream as its state. Memory is limited, so for
each state it keeps every assignment that no other one beats in both seconds and bytes.

`[rules]` has one name for a dim, wherever it occurs. So it can express only one stream throughout,
and with time over `tensor` nothing else is over `tensor`. The same program finds what a stream that
changes inside the layer would gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.collective_time import all_gather_seconds, all_reduce_seconds
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.layer_time import half_time
from spmdtrain.planner.cost.memory import SAFE_SHARE, exact_state, step_memory
from spmdtrain.planner.cost.overlap import exposed
from spmdtrain.planner.cost.software import Software
from spmdtrain.planner.cost.step_time import vocabulary_seconds
from spmdtrain.planner.cost.workload import Group, Workload, workload_of
from spmdtrain.planner.estimate import mesh_sizes, our_software, with_vocab

# Way -> layout of the kind's input, and of that input's gradient.
TAKES = {"split": "whole", "whole": "whole", "tokens": "time"}
# Way -> layout of the kind's output, and of its input's gradient before it is summed.
GIVES = {"split": "partial", "whole": "whole", "tokens": "time"}
# Stream -> activation rules.
STREAMS = {"whole": {}, "embed": {"embed": ["tensor"]}, "time": {"time": ["context", "tensor"]}}
# Kind -> logical axis of its weights.
LOGICAL_AXIS = {"attention": "kv_heads", "mlp": "ffn", "vocabulary": "vocab"}


@dataclass(frozen=True)
class Assignment:
    """A way for each kind of layer.

    `streams` are those before and after attention. `seconds` are those of a step, in all kinds and
    between them. `more_bytes` is relative to splitting all kinds with a whole stream.
    """

    ways: dict[str, str]
    streams: tuple[str, ...]
    seconds: float
    more_bytes: float

    @property
    def rules(self) -> dict[str, dict[str, list[str]]]:
        """The `[rules]` table: whatever differs from the default."""
        unsplit = {axis: [] for kind, axis in LOGICAL_AXIS.items() if self.ways[kind] != "split"}
        return {"parameters": unsplit, "activations": unsplit | STREAMS[self.streams[0]]}

    def extended(self, kind: str, way: str, stream: str, cost: tuple[float, float]) -> "Assignment":
        """Returns the assignment extended by one kind and the stream after it.

        `cost`: (seconds, more bytes).
        """
        seconds, more_bytes = cost
        return Assignment(
            ways=self.ways | {kind: way},
            streams=(*self.streams, stream),
            seconds=self.seconds + seconds,
            more_bytes=self.more_bytes + more_bytes,
        )


def plan_rules(
    config: RunConfig, devices: int, hardware: Hardware
) -> tuple[list[Assignment], list[Assignment]]:
    """Returns assignments for the config's own mesh, best first.

    The first list can be written as `[rules]`; the second allows a stream that changes inside the
    layer. Refuses what a run would refuse.
    """
    if config.model.experts and not config.model.make:
        raise ConfigError(
            "plan --rules does not support models with experts",
            asked="[model.experts]",
            fix="spmdtrain plan, whose settings include the rules of experts",
        )
    config = with_vocab(config)
    sizes = mesh_sizes(config, devices, hardware)
    exact_state(config, sizes)
    workload = workload_of(config, sizes, hardware.device_kind)
    software = our_software(config, hardware)
    by_rules = assign(workload, hardware, software)
    freely = assign(workload, hardware, software, by_rules=False)
    return by_rules, freely


def assign(
    workload: Workload, hardware: Hardware, software: Software, *, by_rules: bool = True
) -> list[Assignment]:
    """Returns the fitting assignments that none beats in both time and memory, fastest first.

    With `by_rules`, only those that can be written as `[rules]`.
    """
    if workload.mesh.tensor == 1:
        raise ConfigError("one device along mesh.tensor splits nothing", fix="--set mesh.tensor=8")
    streams = _possible_streams(workload)
    assignments: list[Assignment] = []
    for first in streams:  # the loop over layers ends with the stream that it started with
        reached = [Assignment({}, (first,), 0.0, -saved_bytes(first, workload))]
        for kind, next_streams in (
            ("vocabulary", [first]),
            ("attention", streams),
            ("mlp", [first]),
        ):
            moves = [
                (way, stream)
                for stream in next_streams
                for way in TAKES
                if not by_rules or _rules_can_say(way, stream, first)
            ]
            reached = _extend_all(reached, kind, moves, workload, hardware, software)
        # The streams before and after attention are the second and the third.
        assignments += [replace(last, streams=last.streams[1:3]) for last in reached]
    free_bytes = SAFE_SHARE * hardware.memory - step_memory(workload).total
    room = max(0.0, free_bytes)
    return undominated([assignment for assignment in assignments if assignment.more_bytes <= room])


def _extend_all(
    assignments: Sequence[Assignment],
    kind: str,
    moves: Sequence[tuple[str, str]],
    workload: Workload,
    hardware: Hardware,
    software: Software,
) -> list[Assignment]:
    """Takes one step of the dynamic program: each assignment with each way of the next kind.

    `moves` are (way, stream after it). For each stream that is reached, the assignments that no
    other one beats are left.
    """
    extended = []
    for assignment in assignments:
        for way, stream in moves:
            around = (assignment.streams[-1], stream)
            cost = cost_of(kind, way, around, workload, hardware, software)
            extended.append(assignment.extended(kind, way, stream, cost))
    best = []
    for stream in dict.fromkeys(stream for _, stream in moves):
        best += undominated([step for step in extended if step.streams[-1] == stream])
    return best


def _possible_streams(workload: Workload) -> list[str]:
    mesh = workload.mesh
    streams = ["whole"]
    if workload.model.embed % mesh.tensor == 0:
        streams.append("embed")
    if workload.train.sequence_length % (mesh.context * mesh.tensor) == 0:
        streams.append("time")
    return streams


def _rules_can_say(way: str, stream: str, first: str) -> bool:
    """Returns True for one stream throughout, and time over `tensor` for all kinds or for none."""
    return stream == first and (way == "tokens") == (first == "time")


def undominated(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Returns the assignments that none beats in both seconds and bytes, fastest first.

    If seconds agree to nine digits, the leanest counts as faster, then the default stream.
    """

    def order(assignment: Assignment) -> tuple[float, float, bool]:
        seconds = float(f"{assignment.seconds:.9g}")
        return seconds, assignment.more_bytes, assignment.streams != ("whole", "whole")

    best: list[Assignment] = []
    for assignment in sorted(assignments, key=order):
        if not best or assignment.more_bytes < best[-1].more_bytes:
            best.append(assignment)
    return best


def cost_of(
    kind: str,
    way: str,
    around: tuple[str, str],
    workload: Workload,
    hardware: Hardware,
    software: Software,
) -> tuple[float, float]:
    """Returns (seconds per step, bytes per device more than split) of using a kind in this way.

    `around` are the streams before and after it.
    """
    forward, backward = _resharding(way, around, workload, hardware)
    work = _way_seconds(kind, way, workload, hardware, software)
    if kind == "vocabulary":  # nothing precedes the embedding or follows the head
        repeats = workload.accumulation / workload.mesh.pipeline
        between = forward + backward
    else:
        repeats = workload.accumulation * workload.layers_per_stage
        if workload.remat == "full":
            forward *= 2  # the backward runs it again
        between = exposed(forward + backward, software.overlap.tensor)
    if way == "tokens":  # each device has the gradients of its own tokens
        gradients = workload.compute_bytes * _weight_elements(kind, workload)
        work += all_reduce_seconds(gradients, workload.mesh.group("tensor"), hardware)
    seconds = repeats * (work + between)
    if way == "split":
        return seconds, 0.0
    return seconds, _unsplit_bytes(kind, workload)


def _resharding(
    way: str, around: tuple[str, str], workload: Workload, hardware: Hardware
) -> tuple[float, float]:
    """Returns the (forward, backward) seconds between a kind and the streams around it."""
    before, after = around
    moved = workload.activation_bytes
    group = workload.mesh.group("tensor")
    into = reshard_seconds(before, TAKES[way], moved, group, hardware)
    out_of = reshard_seconds(GIVES[way], after, moved, group, hardware)
    gradient_into = reshard_seconds(after, TAKES[way], moved, group, hardware)
    gradient_out_of = reshard_seconds(GIVES[way], before, moved, group, hardware)
    return into + out_of, gradient_into + gradient_out_of


def _way_seconds(
    kind: str, way: str, workload: Workload, hardware: Hardware, software: Software
) -> float:
    """Returns the seconds of a kind for a microbatch, without the sums that count as resharding."""
    laid_out = _laid_out(way, workload)
    # Sums over `tensor` turn "partial" into "whole": they are resharding here.
    if kind == "vocabulary":
        sums = 2 * all_reduce_seconds(
            workload.activation_bytes, laid_out.mesh.group("tensor"), hardware
        )
        return vocabulary_seconds(laid_out, hardware, software) - sums
    terms = half_time(kind, laid_out, hardware, software, laid_out.mesh.tensor)
    sums = terms["tensor_collectives"]
    summed_again = sums.forward if workload.remat == "full" else 0.0
    return sum(map(sum, terms.values())) - sum(sums) - summed_again


def _laid_out(way: str, workload: Workload) -> Workload:
    """Returns the workload as seen by a kind that uses `tensor` in this way."""
    mesh = workload.mesh
    if way == "whole":
        return replace(workload, mesh=replace(mesh, tensor=1))
    if way == "tokens":
        context = mesh.context * mesh.tensor
        return replace(workload, mesh=replace(mesh, tensor=1, context=context))
    return workload


def _weight_elements(kind: str, workload: Workload) -> int:
    """Counts the weights of one layer's kind, or of the vocabulary's tables."""
    model = workload.model
    if kind == "vocabulary":
        return shape.vocab(model) * model.embed * shape.vocabulary_tables(model)
    if kind == "attention":
        return round(shape.mean_of_mixers(model, shape.mixer_matrices))
    return round(shape.mean_of_mlps(model, shape.mlp_matrices))


def _unsplit_bytes(kind: str, workload: Workload) -> float:
    """Returns the extra bytes on a device if weights are not split over `tensor`."""
    mesh = workload.mesh
    copies = 1 / mesh.pipeline if kind == "vocabulary" else workload.layers_per_stage
    zero_ways = mesh.data if workload.zero else 1
    float32_gradient = 4
    at_rest = (workload.stored_bytes + workload.optimizer_bytes) / zero_ways
    compute_copy = workload.compute_bytes if workload.zero else 0
    per_weight = at_rest + compute_copy + float32_gradient
    elements = copies * _weight_elements(kind, workload)
    return elements * (1 - 1 / mesh.tensor) / mesh.fsdp * per_weight


def reshard_seconds(
    source: str, target: str, moved: float, group: Group, hardware: Hardware
) -> float:
    """Returns the seconds that activations take from one layout over `group` to another.

    `moved`: their bytes when whole.
    """
    if source in (target, "whole"):  # each device cuts out its part
        return 0.0
    if (source, target) == ("partial", "whole"):
        return all_reduce_seconds(moved, group, hardware)
    if {source, target} == {"time", "embed"}:  # all-to-all: each device sends its own part
        return all_gather_seconds(moved / group.size, group, hardware)
    return all_gather_seconds(moved, group, hardware)


def saved_bytes(stream: str, workload: Workload) -> float:
    """Returns the bytes of kept activations that `stream` saves compared with a whole stream."""
    mesh = workload.mesh
    activations = step_memory(workload).activations
    if stream == "time":
        context = mesh.context * mesh.tensor
        split = replace(workload, mesh=replace(mesh, tensor=1, context=context))
        return activations - step_memory(split).activations
    if stream == "embed" and workload.remat == "full":
        return (1 - 1 / mesh.tensor) * activations
    return 0.0
