"""Finds the best layout: `spmdtrain plan` estimates all, ranks them and says why each lost.

A *layout* is a mesh shape with a microbatch, a schedule and its chunks, remat and ZeRO. Candidates
are what this framework can run: the tensor axis stays inside a host and divides the heads, and
microbatches divide the batch. A closed form of the memory sorts out what cannot fit. For a mesh on
which nothing fits, one layout represents all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spmdtrain.config.arguments import as_whole
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, TransformerConfig, check_config
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.hardware import Hardware, described, devices_per_host
from spmdtrain.planner.cost.memory import SAFE_SHARE, Memory, step_memory
from spmdtrain.planner.cost.schedules import SCHEDULES
from spmdtrain.planner.cost.software import Software
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import MeshShape, Workload, may_move, workload_of
from spmdtrain.planner.estimate import MOST_LAID_OUT, Estimate, our_software, with_vocab
from spmdtrain.planner.own_model import OwnModel, with_traced_optimizer_state
from spmdtrain.planner.settings.accepted import Accepted, settings_of

# Layouts this close to the best are as good, within the error of the model.
WITHIN_ERROR = 0.05
REMATS = ("none", "dots", "full")
MICROBATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (1, 2, 4, 8, 16, 32, 64)
FEWEST_TOKENS = 4096  # per sequence, on each device of a `context` axis
MOST_DEVICES = 2**17  # that are tried if a model does not fit


# Whether a run would accept a layout.
Accepts = Callable[[Workload], bool]


def anything(_: Workload) -> bool:
    """Accepts every layout, for models that this framework does not train."""
    return True


@dataclass(frozen=True)
class Plan:
    """A layout, its estimate, and why it is not the best."""

    estimate: Estimate
    why: str = ""

    @property
    def workload(self) -> Workload:
        return self.estimate.workload

    @property
    def seconds(self) -> float:
        return self.estimate.time.seconds

    @property
    def memory(self) -> Memory:
        return self.estimate.memory

    @property
    def fits(self) -> bool:
        return self.estimate.fits

    @property
    def settings(self) -> list[str]:
        """The layout as arguments of `--set`."""
        return settings_of(self.workload)


def plan(config: RunConfig, devices: int, hardware: Hardware | str | Path) -> list[Plan]:
    """Returns layouts of the config's model and batch on `devices` devices, best first.

    The config's own layout does not matter. `hardware` may be a name, e.g. "h200", or a TOML file.
    Raises ConfigError if nothing fits.
    """
    check_config(config)
    devices = as_whole(devices, "devices", 1, MOST_LAID_OUT)
    config = with_vocab(config)
    hardware = described(hardware)
    unsplit = config.model_copy(
        update={
            "mesh": type(config.mesh)(),
            "pipeline": type(config.pipeline)(),
            "train": config.train.model_copy(update={"microbatch": 1}),
        }
    )
    workload = with_traced_optimizer_state(
        unsplit, workload_of(unsplit, unsplit.mesh.sizes, hardware.device_kind)
    )
    workload = replace(workload, offloads=False)
    own = OwnModel(unsplit) if config.model.make else None
    software = our_software(unsplit, hardware)
    return search(workload, devices, hardware, software, own, Accepted(unsplit))


def search(
    workload: Workload,
    devices: int,
    hardware: Hardware,
    software: Software,
    own: OwnModel | None = None,
    accepts: Accepts = anything,
) -> list[Plan]:
    """Returns layouts of `workload` on `devices` devices, fastest first.

    `own` is a custom model, whose settings `workload` then has. Only layouts that `accepts` allows
    are listed.

    Layouts that fit come first, then the leanest layout of each mesh on which none fits. Raises
    ConfigError if nothing fits at all.
    """
    fitting: list[tuple[Workload, Memory]] = []
    leanest: dict[MeshShape, tuple[Workload, Memory]] = {}
    for candidate in candidates(workload, devices, hardware, own, accepts):
        memory = memory_of(candidate, own)
        mesh = candidate.mesh
        if memory.fits(hardware):
            fitting.append((candidate, memory))
        elif mesh not in leanest or memory.total < leanest[mesh][1].total:
            leanest[mesh] = candidate, memory
    meshes_that_fit = {candidate.mesh for candidate, _ in fitting}
    misfits = [pair for mesh, pair in leanest.items() if mesh not in meshes_that_fit]
    plans = [
        Plan(_best_matmuls(layout, memory, hardware, software, own, accepts))
        for candidate, memory in fitting + misfits
        for layout in filter(accepts, _context_ways(candidate))
    ]
    plans.sort(key=lambda plan: (not plan.fits, plan.seconds))
    for check in (own, accepts):
        if not plans and isinstance(check, OwnModel | Accepted) and check.refusal:
            raise check.refusal
    if not plans or not plans[0].fits:
        smallest = min(plans, key=lambda plan: plan.memory.total, default=None)
        raise _nothing_fits(workload, devices, hardware, smallest, own, accepts)
    return [replace(plan, why=why_not(plan, plans[0])) for plan in plans]


def best_of_each_mesh(plans: Sequence[Plan], count: int) -> list[Plan]:
    """Returns the best plan of each of the first `count` meshes: variants of a mesh are similar."""
    by_mesh: dict[MeshShape, Plan] = {}
    for plan in plans:
        by_mesh.setdefault(plan.workload.mesh, plan)
        if len(by_mesh) == count:
            break
    return list(by_mesh.values())


def why_not(plan: Plan, best: Plan) -> str:
    """Returns the memory of a plan that does not fit, or else the term that costs it most."""
    if not plan.fits:
        needed = plan.memory.total / 1e9
        safe = SAFE_SHARE * plan.estimate.hardware.memory / 1e9
        return f"needs {needed:.0f} GB, {safe:.0f} are safe (memory)"
    behind = plan.seconds - best.seconds
    if behind <= WITHIN_ERROR * best.seconds:
        return "as good as the best, within the model's error"
    time = plan.estimate.time
    best_terms = best.estimate.time.terms
    more = {term: seconds - best_terms[term] for term, seconds in time.terms.items()}
    term = max(more, key=lambda term: more[term])
    return f"{term.replace('_', ' ')} +{more[term]:.3g} s ({time.bound_by(term)})"


def why_axes(plans: Sequence[Plan]) -> list[str]:
    """Returns lines that compare the best plan with other sizes of `expert` and `context`.

    `expert` is compared if there are experts, `context` if sequences are long enough to be split;
    why_not says what another size costs.
    """
    best = plans[0].workload
    lines: list[str] = []
    if best.model.experts is not None:
        own = f"a device multiplies by {best.dispatch().own} of {best.model.experts.count} experts"
        lines += _why_size(plans, "expert", own)
    if any(plan.workload.mesh.context > 1 for plan in plans):
        split = best.mesh.context > 1
        way = f"attention by {best.context_method}" if split else "attention has all keys at hand"
        lines += _why_size(plans, "context", way)
    return lines


def _why_size(plans: Sequence[Plan], axis: str, says: str) -> list[str]:
    """Returns a line on the best plan's size of a mesh axis, and one on each other size."""
    by_size: dict[int, Plan] = {}
    for plan in plans:
        by_size.setdefault(plan.workload.mesh.sizes[axis], plan)
    best = plans[0].workload.mesh.sizes[axis]
    lines = [f"mesh.{axis}={best} is best: {plans[0].seconds:.4g} s a step, {says}"]
    for size in sorted(size for size in by_size if size != best):
        plan = by_size[size]
        seconds = f"{plan.seconds:.4g} s, " if plan.fits else ""
        lines.append(f"  {size}: {seconds}{plan.why}")
    return lines


def memory_of(workload: Workload, own: OwnModel | None = None) -> Memory:
    if own:
        state = own.state(workload)
        return step_memory(workload, (state.parameters, state.optimizer), state.resident)
    return step_memory(workload)


# Candidates


def candidates(
    workload: Workload,
    devices: int,
    hardware: Hardware,
    own: OwnModel | None = None,
    accepts: Accepts = anything,
) -> Iterator[Workload]:
    """Yields every accepted layout that divides the devices, the batch and the model.

    For a mesh whose leanest layout does not fit it yields that one alone, which shows what is
    missing. If that layout would fit with kept activations, moments or both on the host, it yields
    that instead.
    """
    divided = workload.model

    def allowed(layout: Workload) -> bool:
        return accepts(layout) and (own is None or own.allows(layout))

    if own:
        divided = own.divided
        workload = workload.with_settings(model=own.shape)
    for mesh in mesh_shapes(divided, workload.train.sequence_length, devices, hardware):
        if workload.train.global_batch % mesh.batch_shards:
            continue
        if mesh.data > 1 and mesh.data % workload.data_within:
            continue
        # Microbatches of one sequence and full recomputation need the least memory.
        lean = replace(
            workload,
            mesh=mesh,
            microbatch=1,
            remat="full",
            sequence_parallel=_sequence_parallel(workload, mesh),
            dense_over_expert=_dense_over_expert(workload, mesh),
            experts_over_tensor=_experts_over_tensor(workload, mesh),
        )
        zeros = (0, 1) if mesh.data > 1 else (0,)  # ZeRO-1 splits over `data`
        leanest = min(
            filter(allowed, _lean_layouts(lean, zeros)),
            key=lambda layout: memory_of(layout, own).total,
            default=None,
        )
        if leanest is None:
            continue
        if memory_of(leanest, own).fits(hardware):
            yield from filter(allowed, _layouts_on_mesh(lean, zeros))
        else:
            moved = filter(allowed, _on_host(leanest))
            on_host = (layout for layout in moved if memory_of(layout, own).fits(hardware))
            yield next(on_host, leanest)


def _on_host(workload: Workload) -> Iterator[Workload]:
    """Yields the workload with more and more bytes on the host, cheapest first."""
    offloads = workload.mesh.pipeline == 1
    moves = may_move(workload.config)
    if offloads:
        yield replace(workload, offloads=True)
    if moves:
        yield replace(workload, moments_on_host=True)
    if offloads and moves:
        yield replace(workload, offloads=True, moments_on_host=True)


def _context_ways(workload: Workload) -> Iterator[Workload]:
    """Yields the workload with each method of attention over `context` that the run allows."""
    yield workload
    is_split = workload.mesh.context > 1
    if is_split and workload.context_attention == "auto" and workload.takes_ulysses:
        yield replace(workload, context_attention="ulysses")


def _best_matmuls(
    workload: Workload,
    memory: Memory,
    hardware: Hardware,
    software: Software,
    own: OwnModel | None,
    accepts: Accepts,
) -> Estimate:
    """Returns the faster step that fits, with matmuls over `tensor` whole or in pieces.

    With whole matmuls it needs `memory`.
    """
    whole = Estimate(step_time(workload, hardware, software, closed_form=True), memory)
    cut = replace(workload, collective_matmul=True)
    if not workload.sequence_parallel or not accepts(cut):
        return whole
    time = step_time(cut, hardware, software, closed_form=True)
    pieces = Estimate(time, memory_of(cut, own))
    return min(whole, pieces, key=lambda option: (not option.fits, option.time.seconds))


def _sequence_parallel(workload: Workload, mesh: MeshShape) -> bool:
    """Returns True if `tensor` splits the residual stream, which it does if the tokens divide.

    It saves memory and moves the same number of bytes: a reduce-scatter and an all-gather replace
    the all-reduce.
    """
    return mesh.tensor > 1 and workload.train.sequence_length % (mesh.context * mesh.tensor) == 0


def _dense_over_expert(workload: Workload, mesh: MeshShape) -> bool:
    """Returns True if `expert` splits all weights, which it does if their width divides.

    A device that owns experts would otherwise have a copy of everything else.
    """
    return mesh.expert > 1 and workload.model.embed % (mesh.fsdp * mesh.expert) == 0


def _experts_over_tensor(workload: Workload, mesh: MeshShape) -> bool:
    """Returns True if `tensor` owns whole experts, which it does if it splits the tokens and
    experts divide.

    Then nothing is sent twice, and no sum over `tensor` follows.
    """
    experts = workload.model.experts
    if experts is None or not _sequence_parallel(workload, mesh):
        return False
    return mesh.expert > 1 and experts.count % (mesh.expert * mesh.tensor) == 0


def _layouts_on_mesh(workload: Workload, zeros: Sequence[int]) -> Iterator[Workload]:
    per_shard = workload.train.global_batch // workload.mesh.batch_shards
    for microbatch in MICROBATCHES:
        if per_shard % microbatch:
            continue
        cut = replace(workload, microbatch=microbatch)
        for schedule, chunks in schedules_of(cut):
            # A split backward recomputes nothing.
            remats = ("none",) if SCHEDULES[schedule].splits_backward else REMATS
            for remat in remats:
                for zero in zeros:
                    yield replace(cut, schedule=schedule, chunks=chunks, remat=remat, zero=zero)


def _lean_layouts(workload: Workload, zeros: Sequence[int]) -> list[Workload]:
    """Lists the layouts with the least memory: no split backward, which cannot recompute."""
    return [
        replace(workload, schedule=schedule, chunks=chunks, zero=zero)
        for schedule, chunks in schedules_of(workload)
        if not SCHEDULES[schedule].splits_backward
        for zero in zeros
    ]


def mesh_shapes(
    model: TransformerConfig, sequence_length: int, devices: int, hardware: Hardware
) -> Iterator[MeshShape]:
    """Yields the meshes of all devices that divide the model, whose vocabulary is padded.

    Tensor stays inside a host, and there are at most as many stages as layers.
    """
    for tensor in _divisors(devices_per_host(devices, hardware)):
        if any(heads % tensor for heads in model.split_heads) or not _divides_mlps(model, tensor):
            continue
        for pipeline in _divisors(devices // tensor):
            if pipeline > shape.repeats(model):
                continue
            batch_and_time = devices // tensor // pipeline
            for context in CONTEXTS:
                if batch_and_time % context or sequence_length % context:
                    continue
                if context > 1 and sequence_length // context < FEWEST_TOKENS:
                    continue
                shards = batch_and_time // context
                for fsdp, expert in _weight_splits(model, shards):
                    yield MeshShape(
                        pipeline=pipeline,
                        data=shards // fsdp // expert,
                        fsdp=fsdp,
                        expert=expert,
                        context=context,
                        tensor=tensor,
                    )


def _divides_mlps(model: TransformerConfig, tensor: int) -> bool:
    """Returns True if `tensor` divides the width of each mlp, and of each expert."""
    experts = model.experts
    if experts is None:
        return model.ffn % tensor == 0
    dense = model.ffn if "mlp" in model.layer_mlps else 0
    return dense % tensor == experts.ffn % tensor == 0


def _weight_splits(model: TransformerConfig, shards: int) -> Iterator[tuple[int, int]]:
    """Yields the sizes of (`fsdp`, `expert`) that divide the devices and the model."""
    for fsdp in _divisors(shards):
        if model.embed % fsdp:
            continue
        for expert in _divisors(shards // fsdp) if model.experts else (1,):
            if model.experts is None or model.experts.count % expert == 0:
                yield fsdp, expert


def schedules_of(workload: Workload) -> Iterator[tuple[str, int]]:
    """Yields the (schedule, chunks per stage) that the layers and the microbatches allow."""
    stages = workload.mesh.pipeline
    if stages == 1:
        yield "1f1b", 1
        return
    for name, schedule in SCHEDULES.items():
        for chunks in schedule.searched_chunks:
            # Interleaving goes through microbatches in groups of one per stage.
            enough_layers = stages * chunks <= shape.repeats(workload.model)
            if enough_layers and (chunks == 1 or workload.accumulation % stages == 0):
                yield name, chunks


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# If nothing fits


def _nothing_fits(
    workload: Workload,
    devices: int,
    hardware: Hardware,
    smallest: Plan | None,
    own: OwnModel | None,
    accepts: Accepts,
) -> ConfigError:
    """Returns an error that says what is missing. `smallest` needs the least memory of all."""
    request = (
        f"{shape.parameters(workload.model) / 1e9:.3g} G parameters, {devices} x {hardware.name}"
    )
    if smallest is None:
        return _nothing_divides(workload, devices, hardware, request)
    needed = smallest.memory.total
    safe = SAFE_SHARE * hardware.memory
    more = devices
    while more < MOST_DEVICES and not _fits_on(smallest.workload, more, hardware, own, accepts):
        more *= 2
    if _fits_on(smallest.workload, more, hardware, own, accepts):
        fix = f"--devices {more}"
    else:
        fix = f"devices with {needed / SAFE_SHARE / 1e9:.0f} GB"
    return ConfigError(
        "the model fits nowhere",
        asked=request,
        found=f"at least {needed / 1e9:.1f} GB needed on a device, "
        f"{safe / 1e9:.1f} GB available (80 %)",
        fix=fix,
    )


def _nothing_divides(
    workload: Workload, devices: int, hardware: Hardware, request: str
) -> ConfigError:
    meshes = mesh_shapes(workload.model, workload.train.sequence_length, devices, hardware)
    shards = sorted({mesh.batch_shards for mesh in meshes})
    if not shards:
        return ConfigError(
            "no mesh of these devices divides the model", asked=request, fix="another --devices"
        )
    return ConfigError(
        "no layout divides the batch",
        asked=f"train.global_batch={workload.train.global_batch}, {request}",
        fix=f"a global batch that is a multiple of one of {', '.join(map(str, shards))}",
    )


def _fits_on(
    workload: Workload,
    devices: int,
    hardware: Hardware,
    own: OwnModel | None,
    accepts: Accepts,
) -> bool:
    """Returns True if a layout fits on `devices`, with at least one sequence for each device."""
    batch = max(workload.train.global_batch, devices)
    grown = workload.with_settings(train={"global_batch": batch})
    return any(
        memory_of(candidate, own).fits(hardware)
        for candidate in candidates(grown, devices, hardware, own, accepts)
    )
