"""Breakages that a certificate must find: of the mutation list, and eleven planted anew.

The eleven are of the kinds that a fuzz from outside found in another framework
(NVIDIA/Megatron-LM#7452): silent, numerical, and only where layouts are combined.
"""

from dataclasses import dataclass

from tests.mutations.breakages import BREAKAGES, Breakage

NONE = ""  # these are caught by the certificate, not by a named test


@dataclass(frozen=True)
class Planted:
    """`settings`: what the run must have to be broken at all.

    `among`: a part of the names of the layouts that are compared, and `only_resume`: whether they
    are only resumed, not compared. What is found among fewer is found among all, later.
    """

    breakage: Breakage
    settings: tuple[str, ...] = ()
    among: str = ""
    only_resume: bool = False


OF_LAYOUTS = (
    "scatters in the order of the region's axes, not of the spec",
    "sums over one axis too few",
    "scatters a dim that an automatic axis splits too as if it did not",
    "the transpose of a sum over devices is no sum",
    "ZeRO-1 takes a dim that is split already",
    "loss and tokens are those of one data shard",
    "a pipeline divides by the tokens of one batch shard",
    "a pipeline's loss leaves out the expert axis",
    "each stage counts the whole loss",
    "layers are numbered stage by stage, not chunk by chunk",
    "a cell without work adds its gradients",
    "a cell without work adds its deferred weight gradients",
    "every stage takes the gradient of the embedding",
    "the last microbatch's embedding has no gradient",
    "a microbatch is embedded a tick too late",
    "padding computes",
    "the pieces of a collective matmul are put down in the wrong direction",
    "a tokens' shard's gradient of a weight is taken for the whole",
    "the gradients of a weight's copies are averaged",
    "the loss of a split sequence is that of one part",
    "the head takes a stage's rows for the whole vocabulary",
    "a stage looks ids up as if its rows began at 0",
    "the id behind the last row of a part is found in it",
    "a gathered weight is summed over a second time",
    "gradients of keys are not summed over context",
    "padded rows have a part in the softmax",
)
OF_WITNESSES = (
    "the noise of all steps is the same",
    "the noise of all seeds is the same",
    "tokens attend across document ends",
    "positions count on across document ends",
    "all seeds begin with the same weights",
    "stacked vectors decay as matrices",
    "clipping scales small gradients up",
    "the warm-up begins with a rate of 0",
    "the rate is that of the step after",
    "the average of the weights is updated before they are",
)
OF_RESUME = (
    "a resumed run reads the data from its start",
    "the second resume reads other data",
    "layers are laid out anew without leaving their old layout",
    "weights are padded anew without leaving their old padding",
    "the average of a resumed run begins anew",
)
SCHEDULE_FREE = (
    "optimizer.name=schedule_free_adamw",  # the other settings of the section begin anew
    "optimizer.learning_rate=5e-2",
    "optimizer.warmup=2",
    # The place of the decay matters by (1 - beta1) x decay x rate of a step: 5e-3, and not 5e-5.
    "optimizer.weight_decay=1",
)
WITH_SETTINGS = {
    "a rule sees the layers of a stage's chunk as one tensor": ("optimizer.name=lamb",),
    "a schedule-free gradient is taken at the average": SCHEDULE_FREE,
    "steps of the warm-up count too much in the schedule-free average": SCHEDULE_FREE,
    "schedule-free weights decay at the average": SCHEDULE_FREE,
    "leaves the bend of a logit cap out of the gradient": ("model.logit_cap=2",),
}

ANEW = (
    Breakage(
        "a loss is divided by the tokens of a shard, times the shards",
        "train/gradients/sums.py",
        "return psum_tree(sums, axes)",
        'return psum_tree(sums, axes) | {"tokens": sums["tokens"] * jax.lax.psum(1, axes)}',
        NONE,
    ),
    Breakage(
        "a sink's gradient counts twice where heads are split",
        "models/layers/attention/attend.py",
        "number = _number(ctx, layer)\n"
        "attend_in_window = partial(self._attend, ctx, q, k, v, sinks, options)\n"
        "return by_kind(self._kinds, number, attend_in_window)",
        "number = _number(ctx, layer)\n"
        "if sinks is not None and q.shape[2] != q_btkgd.shape[2]:\n"
        "    sinks = 2 * sinks - jax.lax.stop_gradient(sinks)\n"
        "attend_in_window = partial(self._attend, ctx, q, k, v, sinks, options)\n"
        "return by_kind(self._kinds, number, attend_in_window)",
        NONE,
    ),
    Breakage(
        "the gradient of what is shared is that of one device",
        "parallel/reduce.py",
        "return (scatter_sum(dx.astype(jnp.float32), axes, dim).astype(dx.dtype),)",
        "size = dx.shape[dim] // jax.lax.psum(1, axes)\n"
        "begin = jax.lax.axis_index(axes) * size\n"
        "return (jax.lax.dynamic_slice_in_dim(dx, begin, size, dim),)",
        NONE,
    ),
    Breakage(
        "stages read a checkpoint's layers by numbers of their own",
        "checkpoints/leaves/relayout.py",
        "x = setup.model.stage_layout.staged(layout.unstaged(x))",
        "x = jax.numpy.repeat(x[:, :1], x.shape[1], 1) if layout.stages > 1 else x\n"
        "x = setup.model.stage_layout.staged(layout.unstaged(x))",
        NONE,
    ),
    Breakage(
        "a part of a sequence masks by places of its own",
        "models/layers/attention/attend.py",
        "aligned = not self.causal or (cache is None and q.shape[1] == k.shape[1])",
        "aligned = not self.causal or cache is None",
        NONE,
    ),
    Breakage(
        "each shard of the data has noise of its own",
        "train/gradients/forward.py",
        'sample_noise(train.seed, step, microbatch["sample"])',
        "sample_noise(train.seed, step, "
        'microbatch["sample"] + jax.lax.axis_index("data").astype("uint32"))',
        NONE,
    ),
    Breakage(
        "every shard of the batch reads the samples of the first",
        "train/batch.py",
        "mine = ids[:, start:stop]",
        "mine = ids[:, : stop - start]",
        NONE,
    ),
    Breakage(
        "a smoothed loss sees the vocabulary of one device",
        "../pallas_kernels/loss/api.py",
        "all_rows = rows * jax.lax.psum(1, axis_name)",
        "all_rows = rows * 1",
        NONE,
    ),
    Breakage(
        "what stages share is summed over all axes but theirs",
        "train/exchange.py",
        "reduced = [axis for axis in MANUAL_AXES if mesh.shape[axis] > 1]",
        'reduced = [axis for axis in MANUAL_AXES if mesh.shape[axis] > 1 and axis != "pipeline"]',
        NONE,
    ),
    Breakage(
        "gradients that are scattered are averaged",
        "parallel/reduce.py",
        "slices[path] = scatter_sum(slices[path], (axis,), dim)",
        "slices[path] = scatter_sum(slices[path], (axis,), dim) / jax.lax.psum(1, axis)",
        NONE,
    ),
    Breakage(
        "the last microbatch has no gradient",
        "train/gradients/grad_accumulation.py",
        "totals, _ = jax.lax.scan(add, nothing, batch)",
        "kept = jax.tree.map(lambda x: x[:-1], batch)\n"
        "totals, _ = jax.lax.scan(add, nothing, kept)",
        NONE,
    ),
)


AMONG = {
    "a resumed run reads the data from its start": "data 3",
    "the second resume reads other data": "data 3",
    "the average of a resumed run begins anew": "data 3",
    "weights are padded anew without leaving their old padding": "data 3",
    "scatters in the order of the region's axes, not of the spec": "embed expert,fsdp",
    "scatters a dim that an automatic axis splits too as if it did not": "vocab tensor,fsdp",
    "a pipeline's loss leaves out the expert axis": "interleaved",
    "layers are numbered stage by stage, not chunk by chunk": "interleaved",
    "a cell without work adds its gradients": "interleaved",
    "a cell without work adds its deferred weight gradients": "uneven",
    "the gradients of a weight's copies are averaged": "zero_bubble",
    "the pieces of a collective matmul are put down in the wrong direction": "context 2 x tensor 4",
    "a tokens' shard's gradient of a weight is taken for the whole": "dots, collective matmul",
    "gradients of keys are not summed over context": "dots, collective matmul",
    "leaves the bend of a logit cap out of the gradient": "ulysses",
    "a part of a sequence masks by places of its own": "context",
    "what stages share is summed over all axes but theirs": "pipeline",
    "the last microbatch has no gradient": "microbatch 1",
}


def planted() -> list[Planted]:
    """Returns all breakages that a certificate must find."""
    by_name = {each.what: each for each in BREAKAGES}
    resumed = (*OF_RESUME, "stages read a checkpoint's layers by numbers of their own")
    chosen = [by_name[name] for name in (*OF_LAYOUTS, *OF_WITNESSES, *OF_RESUME, *WITH_SETTINGS)]
    return [
        Planted(
            each,
            WITH_SETTINGS.get(each.what, ()),
            AMONG.get(each.what, ""),
            only_resume=each.what in resumed,
        )
        for each in (*chosen, *ANEW)
    ]
