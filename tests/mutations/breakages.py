"""Deliberate breakages of the numbers, and the test that catches each: `make mutations` sees them
all caught.

Each is of a kind that a tired person writes: an order of axes, a missing cast, a sum over one axis
too few, a mask left out. One place of the file reads as `before`, token by token (place.py), and
`caught_by` fails if `after` stands there.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Breakage:
    what: str
    file: str  # below spmdtrain/
    before: str
    after: str
    caught_by: str  # arguments of pytest


REDUCE = "tests/parallel/test_reduce.py"
LAYOUTS = "tests/train/test_layouts.py"
PIPELINES = "tests/train/test_pipeline_gradients.py"
LAYOUT = f"{LAYOUTS}::test_it_trains_on_this_mesh_as_on_one_device"
DATA = f"'{LAYOUT}[data=2]'"
TENSOR = f"'{LAYOUT}[tensor=4 remat=dots]'"
CONTEXT = f"'{LAYOUT}[dropout=0.1 fsdp=4 context=2 remat=full]'"
PIPELINE = f"{PIPELINES}::test_gradients_are_those_of_one_device"
ONE_F_ONE_B = f"'{PIPELINE}[layers=6-p2  1f1b v1 m1p none]'"
PIPELINE_DATA = f"'{PIPELINE}[layers=6 packing=documents-p2 data tensor gpipe v1 m2p dots]'"
INTERLEAVED = f"'{PIPELINE}[layers=6 dropout=0.1-p2 data fsdp interleaved v3 m2p none]'"
ZERO_BUBBLE = f"'{PIPELINE}[layers=6-p2 fsdp zero_bubble v2 m4p none]'"
PADDED = f"'{PIPELINE}[layers=6-p4 data interleaved v3 m1p full]'"
EXPERT = f"'{PIPELINE}[layers=6 packing=documents-p2 fsdp expert 1f1b v1 m2p none]'"
NAN = "tests/pipeline/test_executor.py -k nan"
PIPELINE_RUN = "tests/train/test_pipeline_run.py"
OPTIMIZER = "tests/train/test_optimizer.py"
EMA = "tests/train/test_ema.py"
LOSS_SCALE = "tests/train/test_loss_scale.py"
SCHEDULE_FREE = "tests/train/test_schedule_free.py"
PRECISION = "tests/train/test_precision.py"
RESUME = "tests/running/test_resume.py"
NOISE = "tests/train/test_noise.py"
DAMAGED = "tests/checkpoints/test_damaged.py"
DATA_ROOM = "tests/data"
PADDING = "tests/parallel/test_padding.py"
COLLECTIVE = "tests/parallel/test_collective_matmul.py"
OVERLAP = "tests/planner/test_overlap.py"
FAMILIES = "tests/models/test_families.py"
EXPERTS = "tests/parallel/test_experts.py"
OF_EXPERTS = f"{EXPERTS}::test_experts_on_a_mesh_are_those_of_one_device_however_tokens_choose"
OWNED = "tests/train/test_owning_axes.py::test_experts_have_the_gradients_of_one_device"
HEAD_LOSS = "tests/kernels/test_linear_cross_entropy.py"

BREAKAGES = [
    # How gradients cross
    Breakage(
        "scatters in the order of the region's axes, not of the spec",
        "parallel/reduce.py",
        "scatter=tuple((axis, dim) for axis, dim in split if axis in axes and axis not in owning),",
        "scatter=tuple((axis, dict(split)[axis]) for axis in axes "
        "if axis in named and axis not in owning),",
        REDUCE,
    ),
    Breakage(
        "sums over one axis too few",
        "parallel/reduce.py",
        "sum=tuple(axis for axis in axes if axis not in named),",
        "sum=tuple(axis for axis in axes if axis not in named)[:-1],",
        REDUCE,
    ),
    Breakage(
        "scatters a dim that an automatic axis splits too as if it did not",
        "parallel/reduce.py",
        "if any(axes_of_dim(automatic[path][dim]) for _, dim in reduction.scatter)",
        "if False",
        REDUCE,
    ),
    Breakage(
        "16-bit sums are not widened on a CPU",
        "parallel/reduce.py",
        "if x.dtype.itemsize != 2:",
        "if x.dtype.itemsize != 1:",
        f"{PIPELINE_RUN} -k bfloat16",
    ),
    Breakage(
        "the transpose of a sum over devices is no sum",
        "parallel/reduce.py",
        "lambda axes, _, dx: (_psum(dx, axes),)",
        "lambda axes, _, dx: (dx,)",
        ONE_F_ONE_B,
    ),
    Breakage(
        "ZeRO-1 takes a dim that is split already",
        "parallel/reduce.py",
        "if not parts[dim] and size]",
        "if size]",
        REDUCE,
    ),
    # Experts
    Breakage(
        "experts are gathered over the axis that owns them",
        "parallel/gather.py",
        "axis in LAYER_AXES and axis not in left_out",
        "axis in LAYER_AXES",
        f"'{OWNED}[expert 2 data 2 fsdp 2 zero]'",
    ),
    Breakage(
        "gradients of experts are summed over the axis that owns them as well",
        "parallel/reduce.py",
        "sum=tuple(axis for axis in axes if axis not in named),",
        "sum=tuple(axis for axis in axes if axis not in named or axis in owning),",
        f"'{OWNED}[expert 2 data 2 fsdp 2 zero]'",
    ),
    Breakage(
        "gradients of experts leave out the devices with other tokens",
        "parallel/experts/places.py",
        "if place.summed:",
        "if place.is_added_once:",
        f"'{OF_EXPERTS}[experts over tensor]'",
    ),
    Breakage(
        "gradients of gates are those of a part of the experts' width",
        "parallel/experts/places.py",
        "return psum_tree(dgates_btk, self.ffn)",
        "return dgates_btk",
        f"'{OF_EXPERTS}[experts, ffn]'",
    ),
    Breakage(
        "each part of the experts' width adds the bias of the whole",
        "parallel/experts/places.py",
        "            if place.is_added_once:\n                weight = self._once(weight)\n",
        "",
        f"'{OF_EXPERTS}[experts, ffn]'",
    ),
    Breakage(
        "results are added to their tokens as they come",
        "parallel/experts/rounds.py",
        "return _sum_of(home.reshape(-1, y_pe.shape[-1]), cut.message_nk)",
        "return jnp.zeros((cut.message_nk.shape[0], y_pe.shape[-1]), jnp.float32)"
        '.at[cut.token_dm].add(home, mode="drop")',
        EXPERTS,
    ),
    Breakage(
        "rows that fill up a tile are no zeros",
        "parallel/experts/receiving.py",
        "row_p = inverse(place_s, padded, row_s)",
        "row_p = jnp.minimum(inverse(place_s, padded, row_s), rows - 1)",
        EXPERTS,
    ),
    Breakage(
        "the rest of a message that was cut by a round is lost",
        "parallel/experts/sending.py",
        "outbox.is_first_s[outbox.place_nk] | (outbox.place_nk == begin_nk)",
        "outbox.is_first_s[outbox.place_nk]",
        EXPERTS,
    ),
    Breakage(
        "the choice that a token does not make goes to the last expert",
        "parallel/experts/sending.py",
        "is_made_nk = (ids_nk >= 0) & (ids_nk < devices * own)",
        "is_made_nk = ids_nk < devices * own",
        EXPERTS,
    ),
    Breakage(
        "an optimizer takes all experts of a layer as one tensor",
        "models/abstract.py",
        'return self.stacked + (self.axes[self.stacked : self.stacked + 1] == ("experts",))',
        "return self.stacked",
        f"{OPTIMIZER} -k 'layerwise_rule or more_dims'",
    ),
    # Microbatches one after the other
    Breakage(
        "loss and tokens are those of one data shard",
        "train/gradients/grad_accumulation.py",
        "        sums = sum_over_shards(sums, setup.rules)\n",
        "        sums = dict(sums)\n",
        DATA,
    ),
    Breakage(
        "gradients of a microbatch keep the dtype of the weights",
        "train/gradients/grad_accumulation.py",
        "return cast(gradients, accumulate), sums",
        "return gradients, sums",
        PRECISION,
    ),
    Breakage(
        "gradients accumulate in the dtype of the weights",
        "train/gradients/grad_accumulation.py",
        "jax.lax.scan(add, (zero_gradients(setup, trained), no_sums), batch)",
        "jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, trained), no_sums), batch)",
        PRECISION,
    ),
    Breakage(
        "training computes in the dtype of the weights",
        "train/gradients/grad_accumulation.py",
        "values = params | cast(here, setup.config.precision.compute)",
        "values = dict(params)",
        PRECISION,
    ),
    Breakage(
        "evaluation counts the loss and the tokens of one shard",
        "train/gradients/grad_accumulation.py",
        "return sum_over_shards(jax.tree.map(jnp.sum, sums), setup.rules)",
        "return jax.tree.map(jnp.sum, sums)",
        f"{PIPELINE_RUN} -k evaluation",
    ),
    Breakage(
        "a side loss has no gradient",
        "train/gradients/grad_accumulation.py",
        "total = objective(losses)",
        'total = losses["loss"]',
        f"{PIPELINE_RUN} -k side_losses",
    ),
    Breakage(
        "evaluation drops out",
        "train/gradients/grad_accumulation.py",
        "forward(weights, microbatch, context(microbatch))",
        "forward(weights, microbatch, context(microbatch, jnp.int32(0)))",
        f"{PIPELINE_RUN} -k evaluation",
    ),
    # Pipelines
    Breakage(
        "a pipeline divides by the tokens of one batch shard",
        "train/gradients/reduction.py",
        "count = jnp.maximum(tokens, 1)",
        "count = jnp.maximum(tokens / setup.rules.sizes['data'], 1)",
        PIPELINE_DATA,
    ),
    Breakage(
        "a pipeline's loss leaves out the expert axis",
        "train/gradients/sums.py",
        "axes = [axis for axis in BATCH_AXES if rules.sizes[axis] > 1]",
        "axes = [axis for axis in BATCH_AXES[:-1] if rules.sizes[axis] > 1]",
        EXPERT,
    ),
    Breakage(
        "a pipeline computes in the dtype of the weights",
        "train/gradients/grad_pipeline.py",
        "        params = cast(params, setup.config.precision.compute)\n",
        "        params = dict(params)\n",
        PRECISION,
    ),
    Breakage(
        "a pipeline's gradients accumulate in compute precision",
        "train/gradients/reduction.py",
        "jax.lax.with_sharding_constraint(jnp.zeros(x.shape, dtype), spec)",
        "jax.lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), spec)",
        PRECISION,
    ),
    Breakage(
        "a pipeline keeps everything where all is to be recomputed",
        "train/gradients/grad_pipeline.py",
        'keep = setup.config.train.remat != "full"',
        "keep = True",
        f"{PIPELINE_RUN} -k recomputes",
    ),
    Breakage(
        "each stage counts the whole loss",
        "pipeline/executor.py",
        "share = jax.tree.map(lambda loss: loss / self.table.stages, _mask(leaves, found))",
        "share = _mask(leaves, found)",
        ONE_F_ONE_B,
    ),
    Breakage(
        "layers are numbered stage by stage, not chunk by chunk",
        "pipeline/executor.py",
        "(jnp.maximum(chunk, 0) * self.layout.stages + self.stage) * layers",
        "(jnp.maximum(chunk, 0) + self.stage * self.layout.chunks) * layers",
        INTERLEAVED,
    ),
    Breakage(
        "a cell without work adds its side loss",
        "pipeline/executor.py",
        'side_losses = _mask(cell["forward_microbatch"] >= 0, side_losses)',
        "side_losses = _mask(True, side_losses)",
        f"{PIPELINE_RUN} -k side_losses",
    ),
    Breakage(
        "a cell without work adds its gradients",
        "pipeline/executor.py",
        "made = _mask(has_work, made)",
        "made = made",
        NAN,
    ),
    Breakage(
        "a cell without work adds its deferred weight gradients",
        "pipeline/executor.py",
        'made = _mask(cell["weight_microbatch"] >= 0, made)',
        "made = made",
        NAN,
    ),
    Breakage(
        "a cell without work may bring NaN into the shared gradients",
        "pipeline/executor.py",
        'carry["shared"] = _accumulate(carry["shared"], _mask(leaves, dshared))',
        'carry["shared"] = _accumulate(carry["shared"], dshared)',
        NAN,
    ),
    Breakage(
        "every stage takes the gradient of the embedding",
        "pipeline/executor.py",
        "entered = (self.stage == 0) & (microbatch >= 0)",
        "entered = microbatch >= 0",
        ONE_F_ONE_B,
    ),
    Breakage(
        "the last microbatch's embedding has no gradient",
        "pipeline/executor.py",
        "    executor.run_embed_backward(carry, int(table.leaving_microbatch[-1]))\n",
        "",
        ONE_F_ONE_B,
    ),
    Breakage(
        "a microbatch is embedded a tick too late",
        "pipeline/schedule.py",
        "return np.append(self.entering_microbatch[1:], np.int32(-1))",
        "return self.entering_microbatch",
        ONE_F_ONE_B,
    ),
    Breakage(
        "every device of tensor sums all tokens over the stages",
        "parallel/regions.py",
        "        if slices == rests:\n",
        "        if True:\n",
        f"{LAYOUTS} -k 'sum_different_tokens and whole'",
    ),
    Breakage(
        "padding computes",
        "pipeline/executor.py",
        "return jnp.where(real, y, x), _mask(real, side_losses)",
        "return y, _mask(real, side_losses)",
        PADDED,
    ),
    Breakage(
        "the pieces of a collective matmul are put down in the wrong direction",
        "parallel/collective_matmul.py",
        "y = _put(y, piece @ matrix, here + hop, ring)",
        "y = _put(y, piece @ matrix, here - hop, ring)",
        f"{COLLECTIVE} -k 'plain_matmul and gather'",
    ),
    Breakage(
        "a tokens' shard's gradient of a weight is taken for the whole",
        "parallel/collective_matmul.py",
        "        return (*axes_of_dim(self.wide[0]), *axes_of_dim(self.wide[1]))\n",
        "        return axes_of_dim(self.wide[0])\n",
        f"{COLLECTIVE} -k plain_matmul",
    ),
    Breakage(
        "remat 'dots' sends the pieces a second time",
        "models/stack.py",
        "jax.checkpoint_policies.save_only_these_names(tensor_matmul.SAVED)",
        "jax.checkpoint_policies.nothing_saveable",
        f"{COLLECTIVE} -k 'just_what_theory_needs and dots'",
    ),
    Breakage(
        "a weight has one gradient for all parts of the tokens",
        "train/setup.py",
        "        return copies_of(rules, specs[path], parameter.stacked)\n",
        "        return Copies()\n",
        f"{LAYOUTS} -k gradients_of_matmuls",
    ),
    Breakage(
        "the gradients of a weight's copies are averaged",
        "parallel/copies.py",
        "copies.sum(self.dim)",
        "copies.mean(self.dim)",
        f"'{LAYOUT}[packing=documents data=2 context=2 zero=1 microbatch=2 remat=dots]'",
    ),
    Breakage(
        "remat 'dots' multiplies the copies of a weight again",
        "parallel/tensor_matmul.py",
        "        return checkpoint_name(y, SAVED)\n\n    if gathers_again",
        "        return y\n\n    if gathers_again",
        f"{LAYOUTS} -k products_of_copies",
    ),
    Breakage(
        "the gradient of the head's input is summed whole",
        "train/gradients/forward.py",
        '        return Whole("stream_time", but_for="time")\n',
        '        return "time"\n',
        f"{COLLECTIVE} -k 'just_what_theory_needs and full'",
    ),
    Breakage(
        "ZeRO-1 shares no dim with fsdp",
        "parallel/reduce.py",
        "return max(even or shared or padded,",
        "return max(even or padded,",
        f"{REDUCE} -k shares_a_dim",
    ),
    # One microbatch
    Breakage(
        "the loss of a split sequence is that of one part",
        "train/gradients/forward.py",
        "return jax.lax.psum(losses, token_axes) if token_axes else losses",
        "return losses",
        CONTEXT,
    ),
    Breakage(
        "the head takes a stage's rows for the whole vocabulary",
        "train/gradients/forward.py",
        'return (*table_axes, *automatic_axes("vocab")), automatic_axes(*TOKEN)',
        'return automatic_axes("vocab"), automatic_axes(*TOKEN)',
        ONE_F_ONE_B,
    ),
    Breakage(
        "the noise of all steps is the same",
        "train/gradients/forward.py",
        'sample_noise(train.seed, step, microbatch["sample"])',
        'sample_noise(train.seed, 0 * step, microbatch["sample"])',
        NOISE,
    ),
    Breakage(
        "the noise of all seeds is the same",
        "train/gradients/forward.py",
        'sample_noise(train.seed, step, microbatch["sample"])',
        'sample_noise(0, step, microbatch["sample"])',
        NOISE,
    ),
    Breakage(
        "tokens attend across document ends",
        "train/gradients/forward.py",
        'segment_ids_bt=microbatch.get("segment_ids"),',
        "segment_ids_bt=None,",
        f"{LAYOUTS} -k documents_are_apart",
    ),
    Breakage(
        "positions count on across document ends",
        "train/gradients/forward.py",
        'positions_bt = microbatch.get("positions")',
        "positions_bt = None",
        f"{LAYOUTS} -k documents_are_apart",
    ),
    # The vocabulary
    Breakage(
        "a stage looks ids up as if its rows began at 0",
        "parallel/vocabulary.py",
        "ids = ids - jax.lax.axis_index(by_hand) * table.shape[0]",
        "ids = ids - 0 * table.shape[0]",
        ONE_F_ONE_B,
    ),
    Breakage(
        "the id behind the last row of a part is found in it",
        "parallel/vocabulary.py",
        "(indices < rows.shape[0])",
        "(indices <= rows.shape[0])",
        TENSOR,
    ),
    # The state
    Breakage(
        "gradients of gathered weights cross fsdp in compute precision",
        "parallel/gather.py",
        "gradient.astype(how.accumulate)",
        "gradient",
        f"{LAYOUTS} -k precisely",
    ),
    Breakage(
        "a gathered weight is summed over a second time",
        "train/setup.py",
        "scattered = gathered[path] if table is None else ()",
        "scattered = ()",
        f"{LAYOUTS} -k every_gradient",
    ),
    Breakage(
        "gradients of keys are not summed over context",
        "parallel/regions.py",
        "summed = scatter_sum(gradient.astype(jnp.float32), axes, dim)",
        "summed = scatter_sum(gradient.astype(jnp.float32), axes, dim) / 2",
        f"{LAYOUTS} -k every_gradient",
    ),
    Breakage(
        "ZeRO-1 gathers float32",
        "train/gradients/grad_accumulation.py",
        "cast_floating(x, setup.config.precision.compute)",
        "x",
        f"{LAYOUTS} -k zero_gathers",
    ),
    Breakage(
        "ZeRO-1 splits nothing",
        "train/setup.py",
        "if zero and data > 1:",
        "if zero and data > 99:",
        f"{LAYOUTS} -k zero_halves",
    ),
    Breakage(
        "moments rest whole",
        "train/state.py",
        """    if leaf == shape:
        return spec""",
        """    if leaf == shape:
        return P()""",
        f"{LAYOUTS} -k zero_halves",
    ),
    Breakage(
        "weights are float32 whatever is asked",
        "train/state.py",
        "x, precision.frozen_weights if model.parameters[path].is_frozen else precision.params",
        "x, 'float32'",
        OPTIMIZER,
    ),
    Breakage(
        "all seeds begin with the same weights",
        "train/setup.py",
        'random_key(setup.config.train.seed, "init")',
        'random_key(0, "init")',
        NOISE,
    ),
    # The optimizer and the step
    Breakage(
        "stacked vectors decay as matrices",
        "train/updates/shipped_optimizers.py",
        "return len(parameter.shape) - parameter.apart >= 2",
        "return len(parameter.shape) >= 2",
        OPTIMIZER,
    ),
    Breakage(
        "a rule sees the layers of a stage's chunk as one tensor",
        "train/updates/whole_tree.py",
        "for _ in range(stacked):",
        "for _ in range(min(stacked, 1)):",
        OPTIMIZER,
    ),
    Breakage(
        "clipping scales small gradients up",
        "train/updates/optimizers.py",
        "scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))",
        "scale = limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)",
        OPTIMIZER,
    ),
    Breakage(
        "the warm-up begins with a rate of 0",
        "train/updates/learning_rates.py",
        "peak * (step + 1) / (warmup + 1)",
        "peak * step / (warmup + 1)",
        OPTIMIZER,
    ),
    Breakage(
        "the state takes the dtype of the gradients",
        "train/updates/optimizers.py",
        "lambda new, old: jnp.asarray(new, old.dtype), after[path], state[path])",
        "lambda new, _: new, after[path], state[path])",
        OPTIMIZER,
    ),
    Breakage(
        "squares of narrow gradients add up narrow",
        "train/updates/optimizers.py",
        "norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients))",
        "norm = optax.tree.norm(gradients).astype(jnp.float32)",
        OPTIMIZER,
    ),
    Breakage(
        "the rate is that of the step after",
        "train/step.py",
        "rate = setup.learning_rate(state.step)",
        "rate = setup.learning_rate(state.step + 1)",
        f"{LAYOUTS} -k learning_rate",
    ),
    Breakage(
        "side losses of a pipeline are not scaled with the loss",
        "pipeline/executor.py",
        "dsides = self.cotangents_of(counts)",
        "dsides = counts",
        f"{LOSS_SCALE} -k divides",
    ),
    Breakage(
        "gradients keep the scale of the loss",
        "train/gradients/reduction.py",
        "count = count * cotangent",
        "count = count * 1",
        f"{LOSS_SCALE} -k within_float16",
    ),
    Breakage(
        "a step that overflowed changes the weights",
        "train/step.py",
        "_judge(config, state, loss, norm) if config.judges_steps else (None, None)",
        "_judge(config, state, loss, norm) if config.guard.in_step else (None, None)",
        f"{LOSS_SCALE} -k 'changes_no_weight and one'",
    ),
    Breakage(
        "good steps before an overflow count on after it",
        "train/loss_scale.py",
        "good_steps = jnp.where(jnp.isfinite(grad_norm), loss_scale.good_steps + 1, 0)",
        "good_steps = loss_scale.good_steps + 1",
        f"{LOSS_SCALE} -k count_anew",
    ),
    Breakage(
        "a checkpoint loses the scale of the loss",
        "checkpoints/leaves/items.py",
        "if item.note is None or item.name not in meta:",
        'if item.note is None or item.name != "recent":',
        f"{LOSS_SCALE} -k to_the_bit",
    ),
    Breakage(
        "a schedule-free gradient is taken at the average",
        "train/step.py",
        "points = optimizers.gradient_points(setup.update_rules, state.params, state.opt_state)",
        "points = state.params",
        f"{SCHEDULE_FREE} -k pipeline",
    ),
    Breakage(
        "steps of the warm-up count too much in the schedule-free average",
        "train/updates/schedule_free.py",
        "weight_sum = state.weight_sum + largest_rate**2",
        "weight_sum = state.weight_sum + learning_rate * largest_rate",
        f"{SCHEDULE_FREE} -k optax",
    ),
    Breakage(
        "schedule-free weights decay at the average",
        "train/updates/schedule_free.py",
        "direction, base_state = base.update(updates, state.base, y)",
        "direction, base_state = base.update(updates, state.base, params)",
        f"{SCHEDULE_FREE} -k optax",
    ),
    Breakage(
        "a run from the weights of another has a z of its own",
        "train/given/weights.py",
        "if any(rule.gradient_point for rule in setup.update_rules.values()):",
        "if not setup.update_rules:",
        f"{SCHEDULE_FREE} -k another",
    ),
    Breakage(
        "the average of the weights is updated before they are",
        "train/step.py",
        "taken = Taken(config, params, gradients",
        "taken = Taken(config, state.params, gradients",
        f"{EMA} -k numpy",
    ),
    Breakage(
        "the average of narrow weights is narrow",
        "train/ema.py",
        "return average + (1 - decay) * (x.astype(jnp.float32) - average)",
        "return (average + (1 - decay) * (x - average)).astype(x.dtype)",
        f"{EMA} -k float32",
    ),
    Breakage(
        "a skipped step moves the average of the weights",
        "train/items.py",
        'if taken.good is not None and item.when_skipped == "keep":',
        'if taken.good is not None and item.when_skipped != "keep":',
        "tests/running/guards/test_guard.py",
    ),
    Breakage(
        "the average of a resumed run begins anew",
        "checkpoints/store.py",
        "return with_items_begun(self._asked_setup(), state, abstract.items.keys() - values), meta",
        "return with_items_begun(self._asked_setup(), state, abstract.items.keys()), meta",
        f"{EMA} -k interrupted",
    ),
    Breakage(
        "every device holds what is of one shard of the data",
        "train/item.py",
        'return P("data", *drop_axes(("data",), start.specs[name]))',
        "return P()",
        "tests/train/test_items.py -k holds_its_own",
    ),
    Breakage(
        "what shards of the data hold begins anew on another mesh, though it could be folded",
        "checkpoints/leaves/items.py",
        "if item.fold is None or {",
        "if item.fold or {",
        "tests/train/test_items.py -k folded",
    ),
    Breakage(
        "copies of items of the state are not compared",
        "running/guards/replicas.py",
        "trees = (state.params, state.opt_state, state.items)",
        "trees = (state.params, state.opt_state)",
        "tests/running/guards/test_replicas.py -k items",
    ),
    Breakage(
        "a run that begins with another's weights averages fresh ones",
        "train/given/weights.py",
        "return with_items_begun(setup, state, setup.state.items)",
        "return state",
        f"{EMA} -k another_run",
    ),
    Breakage(
        "a layer may change its variables, which are forgotten",
        "models/buffer.py",
        "if path in before and before[path] is not array:",
        "if path not in before:",
        "tests/train/test_own_model.py -k not_forgotten",
    ),
    Breakage(
        "an estimate forgets the average of the weights",
        "train/state.py",
        "others = (abstract.step, abstract.opt_state, abstract.items)",
        "others = (abstract.step, abstract.opt_state)",
        "tests/planner/test_memory.py -k argument_bytes",
    ),
    Breakage(
        "a search counts no average of the weights",
        "planner/cost/workload.py",
        "item_bytes=_item_bytes(config),",
        "item_bytes=0,",
        "tests/planner/test_memory.py -k closed_form_of_the_state",
    ),
    # The run
    Breakage(
        "the second resume reads other data",
        "running/saves.py",
        "seen = (step - self._first) * self._setup.config.train.global_batch",
        "seen = step * self._setup.config.train.global_batch",
        f"{RESUME} -k twice",
    ),
    Breakage(
        "a resumed run reads the data from its start",
        "running/device_batches.py",
        "ids = sample + batch_ids(at - step, config.train.global_batch)",
        "ids = batch_ids(at - step, config.train.global_batch)",
        f"{RESUME} -k 'signal or twice'",
    ),
    Breakage(
        "a surplus of weights is dropped",
        "checkpoints/meta.py",
        "names = [*sorted(asked), *sorted(found.keys() - asked.keys())]",
        "names = sorted(asked)",
        f"{RESUME} -k more_or_fewer",
    ),
    Breakage(
        "layers are laid out anew without leaving their old layout",
        "checkpoints/leaves/relayout.py",
        "staged(layout.unstaged(x))",
        "staged(x.reshape(-1, *x.shape[len(layout.shape) :])[: layout.layers][::-1])",
        f"{PIPELINE_RUN} -k 'any_other and p2'",
    ),
    Breakage(
        "weights are padded anew without leaving their old padding",
        "checkpoints/leaves/relayout.py",
        "add_zeros(cut_to(x, shape), shape, leaf.shape)",
        "jnp.resize(x, leaf.shape)",
        f"{PIPELINE_RUN} -k 'any_other and thirds'",
    ),
    # Padding
    Breakage(
        "padded rows have a part in the softmax",
        "train/gradients/forward.py",
        "vocab=setup.model.rows, training=training",
        "vocab=None, training=training",
        f"{LAYOUTS} -k '67 and pipeline'",
    ),
    Breakage(
        "padded rows can be sampled",
        "inference/sample.py",
        "logits_bv = logits_bv[:, : setup.model.rows]",
        "logits_bv = logits_bv[:, :]",
        PADDING,
    ),
    Breakage(
        "sampling forgets how far the text is",
        "inference/sample.py",
        "positions = cache.length + jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)",
        "positions = jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)",
        "tests/test_cli.py -k sample",
    ),
    # What is read from disk
    Breakage(
        "no fingerprint is compared",
        "checkpoints/store.py",
        'saved = {name: tuple(meta["fingerprints"].get(name, ())) for name in found}',
        "saved = found",
        DAMAGED,
    ),
    Breakage(
        "no digest is compared",
        "checkpoints/store.py",
        'meta.pop("digest") != digest(meta)',
        'not meta.pop("digest")',
        f"{DAMAGED} -k alter_position",
    ),
    Breakage(
        "an element is mixed with the sum of its indices",
        "checkpoints/leaves/fingerprint.py",
        "index = index + along * jnp.uint32(stride % 2**32)",
        "index = index + along",
        "tests/checkpoints/test_fingerprint.py",
    ),
    # Which tokens are trained on
    Breakage(
        "a document ends one token too early",
        "data/prepare/encode.py",
        "ids = np.insert(ids, ends, recipe.end_of_text)",
        "ids = np.insert(ids, ends - 1, recipe.end_of_text)",
        f"{DATA_ROOM}/test_documents.py -k end_of_text",
    ),
    Breakage(
        "the loss of a conversation is on its questions too",
        "data/chats/conversation.py",
        "return role == ANSWERS and weight != 0",
        "return role == ANSWERS or weight != 0",
        f"{DATA_ROOM}/test_documents.py -k conversations",
    ),
    Breakage(
        "an answer that a template writes otherwise later is learned nevertheless",
        "data/chats/answers.py",
        "if not text.startswith(through):",
        "if False:",
        f"{DATA_ROOM}/test_chat_templates.py -k by_hand",
    ),
    Breakage(
        "a special token that a message spells passes through a template of Jinja",
        "data/chats/jinja_template.py",
        "for start, end in tokenizer.special_spans(text):",
        "for start, end in ():",
        f"{DATA_ROOM}/test_chat_templates.py -k simple_one",
    ),
    Breakage(
        "the rewards of a pair forget the reference model",
        "train/gradients/pair_loss.py",
        "rewards_bs = beta * (answers.sums_bs - answers.references_bs)",
        "rewards_bs = beta * answers.sums_bs",
        "tests/train/test_pair_loss.py -k 'apart and dpo'",
    ),
    Breakage(
        "the rewards of SimPO grow with the length of an answer",
        "train/gradients/pair_loss.py",
        "rewards_bs = beta * answers.means_bs",
        "rewards_bs = beta * answers.sums_bs",
        "tests/train/test_pair_loss.py -k 'apart and simpo'",
    ),
    Breakage(
        "an answer that is certain has infinite odds, and a gradient that is no number",
        "train/gradients/pair_loss.py",
        "log_bs = jnp.minimum(answers.means_bs, -jnp.finfo(jnp.float32).eps)",
        "log_bs = answers.means_bs",
        "tests/train/test_pair_loss.py -k certain",
    ),
    Breakage(
        "the loss of pairs is a mean over tokens",
        "train/gradients/sums.py",
        'return sums.get("pairs", sums["tokens"])',
        'return sums["tokens"]',
        "tests/train/test_pair_loss.py -k 'apart and orpo'",
    ),
    Breakage(
        "a pair of two equal answers is written",
        "data/prepare/encode.py",
        "if len(found) == 2 and np.array_equal(found[0].ids, found[1].ids):",
        "if False:",
        f"{DATA_ROOM}/test_pairs.py -k equal",
    ),
    Breakage(
        "a loss without a reference depends on one that the data have",
        "data/source.py",
        "references=config.train.needs_reference,",
        "references=True,",
        f"{DATA_ROOM}/test_pairs.py -k reads_none",
    ),
    Breakage(
        "the rejected answer of a pair continues the positions of the chosen one",
        "data/pairs.py",
        "np.arange(size) - begin * halves[:-1]",
        "np.arange(size)",
        f"{DATA_ROOM}/test_pairs.py -k lie_whole",
    ),
    Breakage(
        "a text that spells a special token makes one",
        "data/tokenizers/huggingface_tokenizer.py",
        "self._tokenizer.encode_special_tokens = True",
        "self._tokenizer.encode_special_tokens = False",
        f"{DATA_ROOM}/test_chat.py -k special",
    ),
    Breakage(
        "a token that begins in the opening of an answer is not learned",
        "data/tokenizers/offsets.py",
        "before[np.maximum(self.ends, starts + 1)] > before[starts]",
        "marked[starts]",
        f"{DATA_ROOM}/test_chat.py -k answers",
    ),
    Breakage(
        "the loss is on the token before the one that counts",
        "data/corpus.py",
        "marks = self.loss[start:stop]",
        "marks = self.loss[start - 1 : stop - 1]",
        f"{DATA_ROOM}/test_documents.py -k batches_of_conversations",
    ),
    Breakage(
        "a prepare that was killed goes on at the start of a chunk",
        "data/prepare/shards.py",
        "self._end_shard((file, row))",
        "self._end_shard(position)",
        f"{DATA_ROOM}/test_documents.py -k interrupted",
    ),
    Breakage(
        "a source of a mixture begins anew in each period",
        "data/mixture.py",
        "turn * np.array(self.counts)[source] + self._ranks[slot]",
        "turn + self._ranks[slot]",
        f"{DATA_ROOM}/test_mixture.py -k in_order",
    ),
    Breakage(
        "a source of a mixture is ahead of its share",
        "data/mixture.py",
        "heappush(waiting, (done * length // counts[source], source, done))",
        "heappush(waiting, (0, source, done))",
        f"{DATA_ROOM}/test_mixture.py -k never_off",
    ),
    Breakage(
        "a window that has no room is taken to have some",
        "data/packing.py",
        "put_back(length - in_last * size, new[-1:])",
        "put_back(length - each * size + size, new[-1:])",
        f"{DATA_ROOM}/test_packing.py",
    ),
    Breakage(
        "the parts of a long document do not overlap",
        "data/packing.py",
        "starts = np.repeat(begins, parts) + part * length",
        "starts = np.repeat(begins, parts) + part * (length + 1)",
        f"{DATA_ROOM}/test_packing.py",
    ),
    Breakage(
        "a skipped step changes the state of the optimizer",
        "train/items.py",
        "lambda new, old: jnp.where(good, new, old),",
        "lambda new, old: jnp.where(good | (new.ndim == 0), new, old),",
        "tests/running/guards/test_guard.py",
    ),
    Breakage(
        "a bad step is remembered among the good ones",
        "train/spikes.py",
        "return jnp.where(good, jnp.concatenate([recent[1:], figures[None]]), recent)",
        "return jnp.concatenate([recent[1:], figures[None]])",
        "tests/running/guards/test_spikes.py",
    ),
    Breakage(
        "the figures of the last good steps do not survive a resume",
        "train/spikes.py",
        "recent[-len(newest) :] = newest",
        "recent[: len(newest)] = newest",
        "tests/running/guards/test_spikes.py -k resumed",
    ),
    Breakage(
        "a run that goes back takes the last bad batch again",
        "running/rollback.py",
        "return found.state, found.step, last + 1",
        "return found.state, found.step, last + 1 - setup.config.train.global_batch",
        "tests/running/test_rollback.py",
    ),
    Breakage(
        "a run that goes back saves among bad steps",
        "running/guards/guard.py",
        'return self._config.policy != "rollback" or self._record.in_a_row == 0',
        "return True",
        "tests/running/test_rollback.py -k never",
    ),
    Breakage(
        "links in a checkpoint are followed",
        "checkpoints/hostile.py",
        "        if not _is_plain(path):\n            kind =",
        "        if False:\n            kind =",
        "tests/checkpoints/test_hostile.py -k linked",
    ),
    Breakage(
        "the name of a leaf may be a path",
        "checkpoints/hostile.py",
        'if strange or name.startswith("."):',
        "if False:",
        "tests/checkpoints/test_hostile.py -k name",
    ),
    Breakage(
        "weights may claim more than their files hold",
        "checkpoints/hostile.py",
        "if claimed > most:",
        "if False:",
        "tests/checkpoints/test_hostile.py -k claimed",
    ),
    Breakage(
        "a chunk may claim more than its array",
        "checkpoints/hostile.py",
        "if len(chunk) != len(most) or any(map(operator.gt, chunk, most)):",
        "if False:",
        "tests/checkpoints/test_hostile.py -k claimed",
    ),
    Breakage(
        "a run writes through links in its directory",
        "running/start/directory.py",
        "for path, kind in strange_in(directory).items():",
        "for path, kind in [*strange_in(directory).items()][:0]:",
        "tests/checkpoints/test_hostile.py -k through",
    ),
    Breakage(
        "copies are not compared before a save",
        "running/guards/replicas.py",
        "            self._ask(step, state)\n            self._hear()",
        "            pass",
        "tests/running/guards/test_replicas.py -k ends_before",
    ),
    Breakage(
        "the copies of a leaf are looked for along axes that split it",
        "checkpoints/leaves/fingerprint.py",
        "if size > 1 and axis not in named)",
        "if size > 1 and axis in named)",
        "tests/running/guards/test_replicas.py -k named",
    ),
    Breakage(
        "the device that is right is named",
        "running/guards/replicas.py",
        "if sum_ != right}",
        "if sum_ == right}",
        "tests/running/guards/test_replicas.py -k named",
    ),
    Breakage(
        "a run on fewer devices takes more sequences at once",
        "running/start/elastic.py",
        "for each in range(1, most + 1)",
        "for each in range(1, batch + 1)",
        "tests/running/start/test_elastic.py -k layout",
    ),
    Breakage(
        "a resumed run forgets how many steps were skipped in a row",
        "running/guards/bad_steps.py",
        'return cls(kept.get("in_a_row", 0), [',
        "return cls(0, [",
        "tests/running/test_rollback.py -k resumed",
    ),
    # What the planner takes for hidden
    Breakage(
        "hops count as sums of the vocabulary",
        "planner/cost/overlap.py",
        'if each["kind"] == "collective-permute" else "vocabulary"',
        'if each["kind"] == "all-gather" else "vocabulary"',
        OVERLAP,
    ),
    Breakage(
        "weights that cross fsdp once a step count as hidden in layers",
        "planner/cost/overlap.py",
        'elif kind == "fsdp" and pipelined:',
        'elif kind == "fsdp" and not pipelined:',
        OVERLAP,
    ),
    Breakage(
        "what is hidden costs the work beside it nothing",
        "planner/cost/overlap.py",
        "return seconds - hidden + LOST_BESIDE_COLLECTIVES * hidden",
        "return seconds - hidden",
        OVERLAP,
    ),
    Breakage(
        "vocabulary sums are hidden as the hops are",
        "planner/cost/step_time.py",
        "exposed(microbatches * one, software.overlap.vocabulary)",
        "exposed(microbatches * one, software.overlap.hops)",
        OVERLAP,
    ),
    Breakage(
        "a compiled step forgets what its run was anchored on",
        "planner/estimate.py",
        "return replace(self, time=replace(time, scale=self.time.scale))",
        "return replace(self, time=time)",
        OVERLAP,
    ),
    Breakage(
        "compiled plans are ranked by what the fleet hides",
        "planner/compiled_plans.py",
        "self.seconds or self.plan.seconds",
        "self.plan.seconds",
        "tests/planner/test_compiled_plans.py",
    ),
    Breakage(
        "jax takes less memory than the planner calls safe",
        "processes/xla_flags.py",
        "MEMORY_SHARE = 0.85",
        "MEMORY_SHARE = 0.75",
        "tests/processes/test_xla_flags.py -k safe",
    ),
    # What a block computes of each family
    Breakage(
        "turns neighbours in the place of halves",
        "models/layers/rope.py",
        "first, second = jnp.split(x_btknd.astype(jnp.float32), 2, axis=-1)",
        "first, second = jnp.moveaxis(x_btknd.astype(jnp.float32).reshape("
        "*x_btknd.shape[:-1], -1, 2), -1, 0)",
        f"{FAMILIES} -k 'logits_of_its and qwen2'",
    ),
    Breakage(
        "takes the tokens of a window for those beside the query",
        "models/layers/attention.py",
        "return window - 1 if",
        "return window if",
        f"{FAMILIES} -k 'logits_of_its and mistral'",
    ),
    Breakage(
        "gives every layer the window of the first",
        "models/layers/attention.py",
        "return ctx.layer if layer is None else layer",
        "return 0",
        f"{FAMILIES} -k 'logits_of_its and gemma2'",
    ),
    Breakage(
        "counts a sink with the wrong sign",
        "models/layers/attention.py",
        "jax.nn.sigmoid(lse_bth - sinks_h)",
        "jax.nn.sigmoid(lse_bth + sinks_h)",
        f"{FAMILIES} -k 'logits_of_its and gpt_oss'",
    ),
    Breakage(
        "forgets the offset of a norm",
        "models/layers/norm.py",
        "scale_e = scale_e + self.offset",
        "scale_e = scale_e + 0",
        f"{FAMILIES} -k 'logits_of_its and gemma3'",
    ),
    Breakage(
        "divides the frequencies that yarn keeps",
        "models/layers/rope.py",
        "kept = 1 - _yarn_ramp(",
        "kept = _yarn_ramp(",
        f"{FAMILIES} -k 'logits_of_its and olmo3'",
    ),
    Breakage(
        "scales the scores of a layer that is not scaled",
        "models/layers/rope.py",
        "if not is_scaled or self.scaling is None:",
        "if self.scaling is None:",
        f"{FAMILIES} -k 'logits_of_its and gemma3'",
    ),
    Breakage(
        "leaves the bend of a logit cap out of the gradient",
        "../pallas_kernels/loss/api.py",
        "gradient = gradient * (1 - jnp.square(capped_btv / softcap))",
        "gradient = gradient * 1",
        f"{HEAD_LOSS} -k value_and_gradients",
    ),
]
