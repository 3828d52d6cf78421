"""Every setting of a run by its dotted name, and the values that it is drawn from.

Values come from a setting's own type where that says all (a choice, a switch), else from `VALUES`
or from the examples of its field in the schema. A setting that is neither drawn nor in `NOT_DRAWN`
fails tests/fuzz/test_fuzz.py, so that a new one cannot be missed.
"""

import functools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fuzz.kinds_of_models import values_in_kinds
from spmdtrain.config.schema import RunConfig, Settings
from spmdtrain.config.schema.own import PARTS

Values = dict[str, Any]  # dotted name -> value

HERE = Path(__file__).parent
BASE_FILE = HERE / "base.toml"
BASE: Values = {
    f"{section}.{name}": value
    for section, table in tomllib.loads(BASE_FILE.read_text()).items()
    for name, value in table.items()
}

DEFAULT = "not said"  # of a setting that a draw leaves out

# A value that stands twice is twice as likely.
VALUES: dict[str, Sequence[Any]] = {
    "model.layers": (1, 2, 2, 3),
    "model.embed": (8, 12, 16, 20, 24, 30, 32, 48),
    "model.heads": (1, 2, 2, 3, 4, 4, 6, 8),
    "model.kv_heads": (None, 1, 2, 3, 4),
    "model.head_dim": (None, None, 2, 4, 6, 7, 8),
    "model.ffn": (None, 8, 16, 21, 24, 40, 64),
    "model.vocab": (16, 17, 24, 32, 33, 48, 64, 80),
    "model.max_length": (None, 16, 17, 24),
    "model.dropout": (0.0, 0.1, 0.5),
    "model.rope_theta": (1.5, 100.0, 10_000.0, 1e6),
    "model.norm_epsilon": (1e-6, 1e-5, 1e-2),
    "model.rope_theta_window": (None, None, 1.5, 100.0),
    "model.rope_layers": ((), (), (True, False), (False, True, True)),
    "model.rope_share": (1.0, 1.0, 0.5, 0.75),
    "model.windows": ((), (), (1,), (3, 0), (0, 2, 5), (64,)),
    "model.chunks": ((), (), (3,), (0, 2)),
    "model.score_scale": (None, None, 0.1, 1.0),
    "model.score_cap": (None, None, 1.0, 50.0),
    "model.norm_offset": (0.0, 0.0, 1.0),
    "model.embed_scale": (1.0, 1.0, "sqrt", 3.0),
    "model.residual_scale": (1.0, 1.0, 0.2),
    "model.logit_scale": (1.0, 1.0, 0.1),
    "model.logit_cap": (None, None, 1.0, 30.0),
    "sparsity.pattern": ("none", "none", "none", "1:2", "2:4", "magnitude"),
    "sparsity.share": (0.1, 0.5, 0.9),
    "sparsity.since": (1, 1, 2, 3),
    "sparsity.until": (None, 2, 3, 4),
    "sparsity.every": (None, 1, 1, 2, 2),
    "model.experts.count": (8, 8, 6, 16),
    "model.experts.chosen": (1, 2, 2, 3),
    "model.experts.ffn": (None, 8, 16),
    "model.experts.shared": (0, 1, 1, 2),
    "model.experts.shared_ffn": (None, None, 8, 24),
    "model.experts.smallest_sum": (1e-20, 1e-20, 1e-12, 0.9),
    "model.experts.sum_epsilon": (0.0, 0.0, 1e-6, 0.3),
    "model.experts.first_dense": (0, 1, 1),
    "model.experts.every": (1, 1, 2),
    "model.experts.scale": (1.0, 1.0, 2.5),
    "model.experts.groups": (1, 1, 2, 4),
    "model.experts.groups_kept": (None, 1, 2, 2),
    "model.experts.bias_rate": (None, None, 0.0, 0.01),
    "model.experts.balance": (0.0, 0.01, 0.1),
    "model.experts.z_loss": (0.0, 0.0, 0.01),
    "model.experts.jitter": (0.0, 0.0, 0.1),
    "model.experts.bucket_factor": (0.1, 0.5, 1.25, 8.0),
    "model.full.head_dim": (None, 4, 6, 10),
    "model.full.kv_heads": (None, 1, 2, 4, 4),
    "model.token_layers.dim": (2, 3, 8),
    "model.token_layers.vocab": (None, 80),
    "model.latent.rank": (8, 16, 24),
    "model.latent.query_rank": (None, 8, 16),
    "model.latent.plain_dim": (1, 4, 6),
    "model.latent.rope_dim": (2, 4, 6),
    "model.latent.value_dim": (3, 4, 8),
    "model.latent.epsilon": (None, None, 1e-6, 1e-3),
    "model.mixers": (
        *(("delta",), ("delta", "attention"), ("attention", "conv"), ("ssd", "conv")),
        *(("both",), ("ssd", "both"), ("delta", "delta", "attention")),
    ),
    "model.mlps": (("mlp", "none"), ("none", "mlp")),
    "model.delta.key_heads": (1, 2, 2),
    "model.delta.value_heads": (2, 4, 4),
    "model.delta.key_dim": (3, 4, 8),
    "model.delta.value_dim": (2, 4, 6),
    "model.delta.taps": (1, 2, 3, 4),
    "model.delta.decay": ("head", "channel", "channel"),
    "model.delta.decay_rank": (None, 2, 2),
    "model.delta.gate_rank": (None, 2, 4),
    "model.delta.epsilon": (None, 1e-3, 0.1),
    "model.ssd.heads": (2, 4, 4),
    "model.ssd.head_dim": (2, 4, 5),
    "model.ssd.groups": (1, 2, 2),
    "model.ssd.state": (2, 3, 8),
    "model.ssd.taps": (1, 2, 3, 4),
    "model.ssd.epsilon": (None, 1e-3, 0.1),
    "model.ssd.smallest_step": (0.0, 0.1, 0.5),
    "model.ssd.largest_step": (None, 0.6, 1.0),
    "model.ssd.factors": ((1.0,) * 5, (0.7, 1.3, 0.8, 1.2, 0.9), (2.0, 0.5, 1.0, 1.0, 1.5)),
    "model.ssd.in_factor": (1.0, 0.5, 1.3),
    "model.ssd.out_factor": (1.0, 0.5, 1.3),
    "model.conv.taps": (1, 2, 3, 4),
    "model.both.in_factor": (1.0, 0.5, 1.3),
    "model.both.out_factor": (1.0, 0.5, 1.3),
    "model.temperature.weight": (0.1, 1.0),
    "model.temperature.length": (1, 3, 7),
    "model.multi_token.depth": (1, 1, 2),
    "model.multi_token.weight": (0.3, 1.0, 3.0),
    "model.multi_token.after_norm": (False, True),
    "model.multi_token.frozen": (False, False, True),
    "train.steps": (2, 3, 4, 5, 6),
    "train.global_batch": (2, 4, 6, 8, 8, 12, 16, 16, 24),
    "train.sequence_length": (4, 5, 6, 8, 8, 12, 16),
    "train.seed": (0, 1, 7, 2**31, 2**32 - 1),
    "train.clip": (None, 0.01, 0.5, 1.0, 100.0),
    "train.label_smoothing": (0.0, 0.0, 0.1, 0.9),
    "train.z_loss": (0.0, 0.0, 1e-4, 0.1),
    "optimizer.learning_rate": (1e-4, 1e-3, 1e-2, 1e-2, 0.1, 1.0),
    "optimizer.warmup": (0, 1, 2, 3),
    "optimizer.final_learning_rate": (0.0, 1e-5, 1e-3),
    "optimizer.weight_decay": (0.0, 0.01, 0.1, 1.0),
    "optimizer.beta1": (0.0, 0.5, 0.9),
    # At 0 an update is the quotient of two gradients: noise, where the second is noise.
    "optimizer.beta2": (0.5, 0.9, 0.95, 0.999),
    "optimizer.epsilon": (1e-8, 1e-6, 1e-3, 1.0),
    "optimizer.momentum": (0.0, 0.5, 0.9),
    "optimizer.decay_share": (None, 0.1, 0.5, 1.0),
    "optimizer.decay_rate": (0.5, 0.8),
    "optimizer.ema": (None, None, 0.5, 0.9, 0.999),
    "optimizer.clip_update": (0.1, 1.0, 10.0),
    "optimizer.basis_every": (1, 2, 10),
    "optimizer.basis_beta": (0.5, 0.95),
    "optimizer.basis_largest": (16, 10_000),
    # Which step overflows in float16 may depend on how a batch is cut: no oracle knows it.
    "precision.compute": ("float32", "bfloat16"),
    "data.corpus": ("stdlib", "synthetic", "text", "tokens"),  # streams: tests/data/test_streams.py
    "data.path": ("README.md", "LICENSE", ("README.md", "CONTRIBUTING.md")),
    "data.tokenizer": ("bytes", "characters"),
    "data.validation_fraction": (0.0, 0.05, 0.1, 0.5),
    "data.read_ahead": (1, 2, 4),
    "guard.most_skipped": (1, 10),
    "guard.replica_check": (0, 1, 2),
    "eval.every": (0, 0, 1, 2, 3),
    "eval.batches": (1, 2, 3),
    "mesh.pipeline": (1, 2, 4, 8),
    "mesh.data": (1, 2, 4, 8),
    "mesh.fsdp": (1, 2, 4, 8),
    "mesh.expert": (1, 2, 4, 8),
    "mesh.context": (1, 2, 4, 8),
    "mesh.tensor": (1, 2, 4, 8),
    "mesh.collective_matmul": (False, True),
    "pipeline.schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble"),
    "pipeline.chunks": (1, 1, 2, 3),
    "train.microbatch": (None, 1, 2, 3, 4),
    "model.attention": ("auto",) * 10 + ("xla",) * 9 + ("cudnn",),
    "checkpoint.every": (0, 1, 1, 2, 2, 3),
    "checkpoint.keep": (1, 2, 3),
    "log.every": (1, 2, 10),
    "log.profile": ((), (), (), (1,), (2,), (1, 2)),
    "rules.parameters": (),  # drawn by draw.rules, of the axes that the mesh has
    "rules.activations": (),
}
NOT_DRAWN = {
    "model.make": "names a person's file; tests/checkpoints/test_own_model_by_name.py has it",
    **dict.fromkeys(
        (f"own.{part}" for part in (*PARTS, "arguments")),
        "names code of the person's; tests/running/test_own_by_name.py has it",
    ),
    "model.extra": "is typed by such a model",
    "model.mup_base": "asks for some optimizers; tests/certify/test_widths.py has it",
    "model.rope_scaling": "a table; tests/models/test_families.py has it",
    "model.experts.balance_over": "depends on the accumulation; tests/models/test_router.py has it",
    "data.mix": "a table of sources; tests/data has it",
    "data.phases": "is of data.mix; tests/data/test_phases.py has it",
    "data.validation_path": "of token files that others made; tests/data has it",
    **dict.fromkeys(
        (
            "data.begin_of_text",
            "data.field",
            "data.workers",
            "data.shuffle_buffer",
            "data.cache",
            "data.cache_gb",
        ),
        "is of streams; tests/data/test_streams.py has it",
    ),
    "checkpoint.keep_best": "needs eval.every; tests/checkpoints/test_keeping.py has it",
    "checkpoint.memory_every": "needs a launcher; tests/checkpoints/test_snapshots.py has it",
    "checkpoint.memory_peer": "needs several hosts; tests/launch/test_peer.py has it",
    "checkpoint.export": "writes what others read; tests/interop/test_import_and_export.py has it",
    "checkpoint.keep_every": "decides which files stay; tests/checkpoints/test_keeping.py has it",
    **dict.fromkeys(
        ("eval.tasks", "eval.tasks_every", "eval.task_examples"),
        "asks a package for tasks; tests/inference/test_harness.py has it",
    ),
    "eval.patience": "rounding alone may decide it; tests/running/guards/test_early_stop.py has it",
    "eval.min_delta": "is of eval.patience",
    "train.stages": "compiles a step for each stage; tests/running/test_batch_stages.py has meshes",
    "optimizer.rate_by_batch": "is of train.stages",
    "sparsity.weights": "names paths of parameters; tests/train/test_sparsity.py has it",
    "train.epochs": "is another word for train.steps; tests/data/test_epochs.py has it",
    "guard.expert_load": "needs experts; tests/running/guards/test_routers.py has it",
    "guard.grad_norm": "a limit that rounding alone may cross",
    "guard.sigmas": "likewise; tests/running/guards/test_spikes.py has it",
    "guard.window": "needs guard.sigmas",
    "mesh.elastic": "is of a run on other devices; tests/running/start/test_elastic.py has it",
    "optimizer.groups": "names paths of parameters; tests/train/test_optimizer.py has it",
    "optimizer.memory": "is for few optimizers; tests/train/test_host_moments.py has meshes",
    "optimizer.moment_dtype": "rounds beyond what a draw tolerates; "
    "tests/train/test_small_state.py has it",
    "precision.rounding": "likewise",
    "compression.codec": "rounds beyond what a draw tolerates; "
    "tests/train/test_compression.py has meshes",
    **dict.fromkeys(
        (
            "compression.block",
            "compression.within",
            "compression.rank",
            "compression.ranks",
            "compression.keep",
            "compression.after",
        ),
        "is of compression.codec",
    ),
    **dict.fromkeys(
        (
            "islands.count",
            "islands.index",
            "islands.directory",
            "islands.every",
            "islands.after",
            "islands.outer",
            "islands.rate",
            "islands.momentum",
            "islands.codec",
            "islands.fragments",
            "islands.delay",
            "islands.patience",
            "islands.keep",
        ),
        "needs other runs to meet; tests/running/test_islands.py has them, on meshes",
    ),
    "precision.matmul": "float8 differs from one device by more than rounding, and mxfp8 needs "
    "parts of 32; tests/train/test_train_float8.py and test_train_mxfp8.py have meshes",
    "precision.wide": "is of precision.matmul",
    "precision.scaling": "is of precision.matmul; tests/train/test_train_delayed.py has meshes",
    "precision.scaling_history": "is of precision.scaling",
    "precision.logits": "rounds beyond what a draw tolerates; "
    "tests/train/test_logits.py has meshes",
    "precision.loss_scale": "needs float16; tests/train/test_loss_scale.py has it",
    "precision.loss_scale_steps": "likewise",
    "train.preference": "needs pairs of answers: tests/train/test_pair_loss.py draws meshes",
    **dict.fromkeys(
        ("train.preference_beta", "train.preference_gamma", "train.preference_lambda"),
        "is of train.preference",
    ),
    "distill.teacher": "needs another run; tests/train/test_distillation.py has meshes, and "
    "tests/running/test_taught_run.py has runs",
    "distill.logits": "needs a folder of them; the same tests have meshes and runs",
    **dict.fromkeys(("distill.temperature", "distill.share"), "is of distill.teacher"),
    "train.init_from": "needs another run: what a draw ends in decides it (check.py, `_begun`)",
    "train.new_tokenizer": "is of train.init_from; tests/interop/test_same_tokenizer.py has it",
    "finetune.kind": "freezes what a draw compares; tests/train/test_adapters.py has meshes",
    **dict.fromkeys(
        (
            "finetune.frozen_layers",
            "finetune.rank",
            "finetune.alpha",
            "finetune.rank_stabilised",
            "finetune.targets",
            "finetune.base",
            "finetune.dropout",
            "finetune.also_train",
            "precision.frozen",
        ),
        "only applies to adapters; tests/train/test_adapters.py has it",
    ),
    "kernels.tune": "decides nothing without a GPU; tests/running/start/test_kernels.py has it",
    "log.report": "decides no number, and tests/page has it",
    "guard.replay_check": "decides no number; tests/running/guards/test_other_devices.py has it",
    "log.record": "decides no number, and tests/running/test_record.py has it",
    "log.fingerprints": "decides no number, and tests/replay/test_replay.py has it",
    "log.sinks": "decides no number, and tests/test_seams.py has it",
}
# Lion's update is a sign: a gradient that rounds to the other side of 0 moves by the whole rate.
ROUNDING_DECIDES = {"lion"}
# Tables that a run has or has not, and what such a run leaves out, or has to say.
TABLES: dict[str, Values] = {
    "model.experts": {},
    "model.latent": {
        **dict.fromkeys(("model.kv_heads", "model.head_dim", "model.query_norm"), DEFAULT),
        **{
            "model.output_gate": DEFAULT,
            "model.rope_share": DEFAULT,
            "model.positions": "rope",
            "model.qkv_bias": False,
        },
    },
    "model.multi_token": {},
    "model.temperature": {},
    "model.full": {"model.windows": (3, 0), "model.heads": 4},
    "model.token_layers": {"model.mlp": "swiglu", "mesh.pipeline": 1},
}
# Tables that model.mixers asks for, drawn with it: by mixer. "both" asks for that of "ssd" too.
OF_MIXERS = {name: f"model.{name}" for name in ("delta", "ssd", "conv", "both")}
# Drawn with a whole [model] alone (kinds_of_models.py): what they need is seldom drawn beside them.
INDEXER = "model.indexer"
OF_WHOLE_MODELS = (
    *("model.shared_keys", "model.shared_ffn", "model.idle_keys", "model.experts.width"),
    *("model.mlp_gate_factor", "model.mlp_out_factor", INDEXER),
)
# Decide where and in which order numbers are computed, not which.
LAYOUT = {
    "model.attention",
    "model.context_attention",
    "model.experts.bucket_factor",
    "train.microbatch",
    "train.remat",
    "train.scan_layers",
    "train.zero",
}
LAYOUT_SECTIONS = {"mesh", "pipeline", "checkpoint", "log", "rules"}


@functools.cache
def settings() -> dict[str, FieldInfo]:
    """Dotted name -> field, of every class that a section may have."""
    fields = {}
    for section, of_section in RunConfig.model_fields.items():
        for choice in classes(of_section.annotation):
            for name, field in choice.model_fields.items():
                key = f"{section}.{name}"
                is_table = key in TABLES or key in (*OF_MIXERS.values(), INDEXER)
                fields |= of_table(key) if is_table else {key: field}
    return fields


def of_table(key: str) -> dict[str, FieldInfo]:
    """Dotted name -> field, of the settings of a table of [model]."""
    return {f"{key}.{name}": field for name, field in _fields(key).items()}


def required(key: str) -> set[str]:
    """Dotted names of what a table has no defaults for."""
    return {f"{key}.{name}" for name, field in _fields(key).items() if field.is_required()}


def _fields(key: str) -> dict[str, Any]:
    annotation = class_of("model", "llama").model_fields[key.partition(".")[2]].annotation
    (table,) = (kind for kind in classes(annotation) if kind is not NoneType)
    return table.model_fields


def classes(annotation: Any) -> list[type[Settings]]:
    return [kind for kind in members(annotation) if isinstance(kind, type)]


def class_of(section: str, name: str) -> type[Settings]:
    """Of a section that has several: the one called `name`."""
    choices = classes(RunConfig.model_fields[section].annotation)
    return next(kind for kind in choices if kind.model_fields["name"].default == name)


def names(section: str) -> list[str]:
    """What the classes of a section are called."""
    choices = classes(RunConfig.model_fields[section].annotation)
    found = [kind.model_fields["name"].default for kind in choices]
    return [name for name in found if name not in ROUNDING_DECIDES]


def values_of(key: str) -> Sequence[Any]:
    """What a setting is drawn from; a KeyError where neither its type, nor `VALUES`, nor the
    examples of its field say so.
    """
    if key in VALUES:
        return VALUES[key]
    if of_kinds := values_in_kinds(key) if key.startswith(OF_WHOLE_MODELS) else ():
        return of_kinds
    if examples := settings()[key].examples:
        return examples
    if key.endswith(".name"):
        return names(key.partition(".")[0])
    values: list[Any] = []
    for kind in members(settings()[key].annotation):
        if get_origin(kind) is Literal:
            values += get_args(kind)
        elif kind is bool:
            values += [False, True]
        elif kind is NoneType:
            values += [None]
        else:
            raise KeyError(key)
    return values


def members(annotation: Any) -> list[Any]:
    """The types of a (nested, annotated) union, or the one that it is."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in members(member)]
    return [annotation]


def is_layout(key: str) -> bool:
    return key in LAYOUT or key.partition(".")[0] in LAYOUT_SECTIONS


def text_of(key: str, value: Any) -> str:
    """As it is typed after `--set KEY=`."""
    if key == "data.path" and isinstance(value, tuple | list):
        return f"[{','.join(value)}]"  # where one string is allowed too, a comma may be part of it
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


def overrides(values: Values) -> list[str]:
    """`--set` strings over base.toml. Choosing another class of a section drops what the file
    says of it, so that is said again.
    """
    said = dict(values)
    for section in ("model", "optimizer"):
        if f"{section}.name" in values:
            said = {
                key: value for key, value in BASE.items() if key.startswith(f"{section}.")
            } | said
    return [f"{key}={text_of(key, value)}" for key, value in said.items()]
