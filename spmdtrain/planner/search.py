"""Every layout of a model on N devices, priced and ranked; and why each loser lost.

Candidates are what this framework can run: pipeline x data x fsdp x context x tensor, the tensor axis inside a host and
dividing the heads, microbatches that divide the batch, schedules with their chunks, remat, ZeRO. What cannot fit is
told apart by the closed form of its memory: of a mesh that cannot fit, one candidate stands for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spmdtrain.config.errors import ConfigError
from spmdtrain.planner import cost, memory
from spmdtrain.planner.cost import Price
from spmdtrain.planner.hardware import Hardware
from spmdtrain.planner.job import Job, Layout, Shape
from spmdtrain.planner.memory import SAFE, Memory
from spmdtrain.planner.stack import Stack

CLOSE = 0.05  # layouts within this of the best are as good as it, for all the model knows
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4), ("zero_bubble", 1))
REMATS = ("none", "dots", "full")
MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Plan:
    """A candidate: its price, its memory, and what it loses to the best in seconds, by what limits it."""

    price: Price
    memory: Memory
    why: str = ""

    @property
    def job(self) -> Job:
        return self.price.job

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.price.device)

    @property
    def settings(self) -> list[str]:
        """`--set` arguments."""
        job = self.job
        found = [f"mesh.{axis}={size}" for axis, size in job.layout.sizes.items()]
        found += [f"train.microbatch={job.microbatch}", f"train.remat={job.remat}", f"train.zero={job.zero}"]
        if job.layout.pipeline > 1:
            found += [f"pipeline.schedule={job.schedule}", f"pipeline.chunks={job.chunks}"]
        return found


def search(job: Job, devices: int, device: Hardware, stack: Stack) -> list[Plan]:
    """Layouts of `job` on `devices` devices that fit, fastest first, then of each mesh that does not fit what needs
    least memory; ConfigError if none fits."""
    fitting, lean = [], {}
    for candidate in candidates(job, devices, device, stack):
        held, mesh = held_by(candidate, stack), candidate.layout
        if held.fits(device):
            fitting.append((candidate, held))
        elif mesh not in lean or held.total < lean[mesh][1].total:
            lean[mesh] = candidate, held
    meshes = {candidate.layout for candidate, _ in fitting}
    misfits = [pair for mesh, pair in lean.items() if mesh not in meshes]
    found = [Plan(cost.price(each, device, stack, cost.closed_bubble), held) for each, held in fitting + misfits]
    found.sort(key=lambda plan: (not plan.fits, plan.price.step))
    if not found or not found[0].fits:
        raise _nothing(job, devices, device, stack, min(found, key=lambda plan: plan.memory.total, default=None))
    return [replace(plan, why=why_not(plan, found[0])) for plan in found]


def held_by(job: Job, stack: Stack) -> Memory:
    return memory.ours(job) if stack.lockstep else memory.megatron(job)


def candidates(job: Job, devices: int, device: Hardware, stack: Stack) -> Iterator[Job]:
    """Every job like this one that divides the devices, the batch and the model, and whose state alone fits."""
    for layout in layouts(job.shape, job.sequence, devices, device):
        if job.global_batch % layout.shards or (not stack.lockstep and layout.fsdp * layout.context > 1):
            continue
        one = replace(job, layout=layout, microbatch=1, remat="full")
        zeros = (0, 1) if layout.data > 1 and stack.lockstep else (0,)
        leanest = min(_lean(one, zeros[-1]), key=lambda each: held_by(each, stack).total)
        if not held_by(leanest, stack).fits(device):
            yield leanest  # it says how much is missing
            continue
        per_shard = job.global_batch // layout.shards
        for microbatch in (size for size in MICROBATCHES if per_shard % size == 0):
            cut = replace(one, microbatch=microbatch)
            for schedule, chunks in _schedules(job.shape, layout, cut.accumulation):
                if not stack.lockstep and schedule == "zero_bubble":
                    continue
                for remat in REMATS if stack.lockstep else ("none", "full"):
                    if schedule == "zero_bubble" and remat != "none":
                        continue
                    for zero in zeros:
                        yield replace(cut, schedule=schedule, chunks=chunks, remat=remat, zero=zero)


def _lean(one: Job, zero: int) -> list[Job]:
    """What a layout needs least memory with: its smallest microbatch, by schedule."""
    schedules = _schedules(one.shape, one.layout, one.accumulation)
    return [
        replace(one, schedule=schedule, chunks=chunks, zero=zero)
        for schedule, chunks in schedules
        if schedule != "zero_bubble"
    ]


def layouts(shape: Shape, sequence: int, devices: int, device: Hardware) -> Iterator[Layout]:
    """Mesh sizes: tensor inside a host and dividing the key-value heads; no more stages than layers."""
    per_host = min(devices, device.per_host)
    for tensor in _divisors(per_host):
        if shape.kv_heads % tensor or shape.hidden % tensor or shape.vocab % tensor:
            continue
        for pipeline in _divisors(devices // tensor):
            if pipeline > shape.layers or shape.vocab % (pipeline * tensor):
                continue
            rest = devices // tensor // pipeline
            for context in (1, 2, 4, 8, 16):
                if rest % context or sequence % context or (context > 1 and sequence // context < 4096):
                    continue
                for fsdp in _divisors(rest // context):
                    if shape.embed % fsdp:
                        continue
                    yield Layout(pipeline, rest // context // fsdp, fsdp, 1, context, tensor)


def _schedules(shape: Shape, layout: Layout, m: int) -> Iterator[tuple[str, int]]:
    p = layout.pipeline
    if p == 1:
        yield "1f1b", 1
        return
    for schedule, chunks in SCHEDULES:
        if p * chunks <= shape.layers and (chunks == 1 or m % p == 0):
            yield schedule, chunks


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def why_not(plan: Plan, best: Plan) -> str:
    """Memory, if it does not fit; else what the plan spends more time on than the best, the largest term of that."""
    if not plan.fits:
        return f"needs {plan.memory.total / 1e9:.0f} GB, {SAFE * plan.price.device.memory / 1e9:.0f} are safe (memory)"
    behind = plan.price.step - best.price.step
    if behind <= CLOSE * best.price.step:
        return "as good as the best, within the model's error"
    more = {term: plan.price.seconds[term] - best.price.seconds[term] for term in plan.price.seconds}
    term = max(more, key=more.get)
    return f"{term.replace('_', ' ')} +{more[term]:.3g} s ({plan.price.bound(term)})"


def distinct(plans: Sequence[Plan], count: int) -> list[Plan]:
    """The first `count` plans with different meshes: variants of one mesh differ little."""
    seen: dict[Layout, Plan] = {}
    for plan in plans:
        seen.setdefault(plan.job.layout, plan)
        if len(seen) == count:
            break
    return list(seen.values())


def _nothing(job: Job, devices: int, device: Hardware, stack: Stack, smallest: Plan | None) -> ConfigError:
    asked = f"{job.shape.parameters / 1e9:.3g} G parameters, {devices} x {device.name}"
    if smallest is None:
        shards = ", ".join(
            map(str, sorted({each.shards for each in layouts(job.shape, job.sequence, devices, device)}))
        )
        if not shards:
            return ConfigError("no mesh of these devices divides the model", asked=asked, fix="other --devices")
        return ConfigError(
            "no layout divides the batch",
            asked=f"train.global_batch={job.global_batch}, {asked}",
            fix=f"a global batch that is a multiple of one of {shards}",
        )
    total, leanest = smallest.memory.total, smallest.job
    room, more = SAFE * device.memory, devices
    while more < 2**17 and not _fits_on(leanest, more, device, stack):
        more *= 2
    hint = (
        f"--devices {more}" if _fits_on(leanest, more, device, stack) else f"devices with {total / SAFE / 1e9:.0f} GB"
    )
    return ConfigError(
        "the model fits nowhere",
        asked=asked,
        found=f"at least {total / 1e9:.1f} GB needed on a device, {room / 1e9:.1f} GB there (80 %)",
        fix=hint,
    )


def _fits_on(job: Job, devices: int, device: Hardware, stack: Stack) -> bool:
    """Whether some layout fits on that many devices, with a batch that grows with them."""
    grown = replace(job, global_batch=max(job.global_batch, devices))
    return any(held_by(each, stack).fits(device) for each in candidates(grown, devices, device, stack))
