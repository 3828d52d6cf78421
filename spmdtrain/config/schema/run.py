"""All sections together, and the checks that need several of them."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from spmdtrain.config.given import as_whole, check_kind
from spmdtrain.config.own.section import OwnConfig
from spmdtrain.config.schema.checkpoint import CheckpointConfig
from spmdtrain.config.schema.data import DataConfig
from spmdtrain.config.schema.eval import EvalConfig
from spmdtrain.config.schema.finetune import FinetuneConfig, SparsityConfig
from spmdtrain.config.schema.guard import GuardConfig
from spmdtrain.config.schema.log import LogConfig
from spmdtrain.config.schema.mesh import (
    CompressionConfig,
    IslandsConfig,
    MeshConfig,
    RulesConfig,
)
from spmdtrain.config.schema.model import GPT, Llama
from spmdtrain.config.schema.optimizer import (
    Adafactor,
    AdamW,
    Lamb,
    Lion,
    Muon,
    ScheduleFreeAdamW,
    Sgd,
    Soap,
)
from spmdtrain.config.schema.pipeline import PipelineConfig
from spmdtrain.config.schema.precision import KernelsConfig, PrecisionConfig
from spmdtrain.config.schema.train import DistillConfig, TrainConfig
from spmdtrain.config.settings import Settings
from spmdtrain.config.stages import TimedStage

HEAD = "unembed_ve"  # the path of an untied head


class RunConfig(Settings):
    """The settings of one run."""

    model: Annotated[GPT | Llama, Field(discriminator="name")] = GPT()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: TrainConfig = TrainConfig()
    optimizer: Annotated[
        Adafactor | AdamW | Lamb | Lion | Muon | ScheduleFreeAdamW | Sgd | Soap,
        Field(discriminator="name"),
    ] = AdamW()
    finetune: FinetuneConfig = FinetuneConfig()
    distill: DistillConfig = DistillConfig()
    sparsity: SparsityConfig = SparsityConfig()
    precision: PrecisionConfig = PrecisionConfig()
    compression: CompressionConfig = CompressionConfig()
    islands: IslandsConfig = IslandsConfig()
    kernels: KernelsConfig = KernelsConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()
    rules: RulesConfig = RulesConfig()
    own: OwnConfig = OwnConfig()

    _origin: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    if TYPE_CHECKING:
        # Pydantic also takes a section as the table that a TOML file would have.
        def __init__(self, **sections: Settings | Mapping[str, Any]) -> None: ...

    def derived(self) -> dict[str, Any]:
        """Returns the model section, in which `max_length` is that of training unless given."""
        return {"model": self.model.with_derived(max_length=self.train.sequence_length)}

    @property
    def origin(self) -> dict[str, str]:
        """The origin of each value by dotted key: a file name, or `--set`.

        A key that is absent has its default.
        """
        return self._origin

    @property
    def notes(self) -> list[str]:
        """The changes made while loading, which a run reports."""
        return self._notes

    @property
    def vocab(self) -> int:
        """The value of `model.vocab`, which the config or `with_vocab` must have set."""
        if self.model.vocab is None:
            raise ValueError("model.vocab is not set yet; config.with_vocab(...)")
        return self.model.vocab

    @property
    def judges_steps(self) -> bool:
        """True if the compiled step judges itself: a bad one leaves the weights unchanged."""
        return self.guard.in_step or self.precision.compute == "float16"

    def with_vocab(self, vocab: int) -> "RunConfig":
        """Returns the same run with `model.vocab` set to the tokenizer's size."""
        vocab = as_whole(vocab, "vocab", 1, 2**31 - 1)
        return self.model_copy(update={"model": self.model.model_copy(update={"vocab": vocab})})

    def with_steps(self, steps: int) -> "RunConfig":
        """Returns the same run with `train.steps` instead of `train.epochs`.

        Raises ValueError if other settings name steps beyond the last.
        """
        train = self.train.model_copy(update={"steps": steps, "epochs": None})
        counted = self.model_copy(update={"train": train})
        where = self._origin.get("train.epochs", "Python")
        others = {key: of for key, of in self._origin.items() if key != "train.epochs"}
        counted._origin = others | {"train.steps": f"train.epochs={self.train.epochs:g} of {where}"}
        counted._notes = [*self._notes]
        counted._check_steps()
        return counted

    @property
    def eval_windows(self) -> int | None:
        """The number of windows of each validation split that an evaluation uses; None: all of
        them.
        """
        batches = self.eval.batches
        return None if batches is None else batches * self.train.global_batch

    @model_validator(mode="after")
    def _check(self):
        length = self.train.sequence_length
        if length > self.model.max_length:
            raise ValueError(self._too_long(length))
        splits_backward = self.mesh.pipeline != 1 and self.pipeline.schedule == "zero_bubble"
        if splits_backward and self.train.remat != "none":
            raise ValueError(
                f"train.remat={self.train.remat!r}: zero_bubble splits a layer's backward in "
                "two, which needs remat 'none'; or set pipeline.schedule='interleaved'"
            )
        if self.train.remat == "offload" and self.mesh.pipeline != 1:
            raise ValueError(
                f"train.remat='offload': the stages of mesh.pipeline={self.mesh.pipeline} keep few "
                "layers' inputs, and keep them on the device; set train.remat='full'"
            )
        if self.train.scan_layers is False and self.mesh.pipeline != 1:
            raise ValueError(
                f"train.scan_layers=false: the stages of mesh.pipeline={self.mesh.pipeline} run "
                "their layers in a loop; set train.scan_layers=true"
            )
        if self.guard.policy == "rollback" and self.checkpoint.every == 0:
            raise ValueError(
                "guard.policy='rollback' goes back to a checkpoint, but checkpoint.every=0 saves "
                "none during the run; set checkpoint.every='auto'"
            )
        if (self.checkpoint.keep == "best" or self.checkpoint.keep_best) and not self.eval.every:
            raise ValueError(
                "the best checkpoints are those with the lowest eval_loss, and eval.every=0 "
                "never evaluates; set eval.every=100"
            )
        if self.guard.expert_load is not None and not self.model.experts and not self.model.make:
            raise ValueError(
                f"guard.expert_load={self.guard.expert_load:g} limits routers, and there is no "
                "[model.experts]"
            )
        for name, frozen in self._frozen_by_name().items():
            self._check_frozen_layers(name, frozen)
        if self.sparsity.pattern != "none":
            self._check_sparsity()
        if self.compression.has_feedback and self.train.zero:
            raise ValueError(
                f"compression.codec={self.compression.codec!r} keeps 4 bytes of each weight on "
                "every device, more than train.zero=1 saves; set train.zero=0, or "
                "compression.codec='int8'"
            )
        if self.precision.scaling == "delayed":
            self._check_delayed_scaling()
        if self.train.learns_pairs:
            self._check_pairs()
        if self.islands.are_several:
            self._check_islands()
        if self.distill.is_on:
            self._check_distill()
        if self.train.stages:
            self._check_stages()
        elif self.optimizer.rate_by_batch != "none":
            raise ValueError(
                f"optimizer.rate_by_batch={self.optimizer.rate_by_batch!r} needs batches of "
                "several sizes; add [[train.stages]]"
            )
        if self.own.learning_rate is not None and self.optimizer.rate_by_batch != "none":
            raise ValueError(
                f"optimizer.rate_by_batch={self.optimizer.rate_by_batch!r} does not change "
                "the rate of own.learning_rate; set optimizer.rate_by_batch='none'"
            )
        if self.train.epochs is None:
            self._check_steps()
        if self.model.mup_base is not None and not self.optimizer.has_width_rule:
            raise ValueError(
                f"model.mup_base={self.model.mup_base}: muP knows no rates of "
                f"optimizer.name={self.optimizer.name!r}; set optimizer.name='adamw', 'lion' or "
                "'muon'"
            )
        if self.model.mup_base is not None and not self.train.init_from:
            self._check_head_learns()
        if self.optimizer.final_learning_rate > self.optimizer.learning_rate:
            raise ValueError("optimizer.final_learning_rate is above optimizer.learning_rate")
        narrow = self.precision.params
        if isinstance(self.optimizer, ScheduleFreeAdamW) and narrow != "float32":
            raise ValueError(
                f"precision.params={narrow!r}: an average of n steps moves by 1 / n, which rounds "
                "to nothing there; set precision.params='float32' for schedule_free_adamw"
            )
        return self

    @property
    def frozen_in_stack(self) -> int:
        """The number of frozen layers in the stack: `finetune.frozen_layers` without the dense
        ones.
        """
        dense = self.model.layers - self.model.stack_layers
        return max(0, self.finetune.frozen_layers - dense)

    @property
    def always_frozen(self) -> int:
        """The number of first layers that are frozen in all stages of the run."""
        stages = self.train.timetable
        return min(self.in_stage(stage).finetune.frozen_layers for stage in stages)

    def _frozen_by_name(self) -> dict[str, int]:
        """Returns the numbers of frozen layers that are asked for, except 0, by setting."""
        asked: dict[str, int | None] = {
            f"train.stages[{number}].frozen_layers": stage.frozen_layers
            for number, stage in enumerate(self.train.stages)
        }
        asked["finetune.frozen_layers"] = self.finetune.frozen_layers
        return {name: frozen for name, frozen in asked.items() if frozen}

    def _check_frozen_layers(self, name: str, frozen: int) -> None:
        """Refuses a number of frozen layers that leaves nothing to train or cannot be frozen."""
        model = self.model
        dense = model.layers - model.stack_layers
        asked = f"{name}={frozen}"
        if not dense < frozen < model.layers:
            raise ValueError(
                f"{asked}: of the {model.layers} layers from {dense + 1} to {model.layers - 1} can "
                f"be frozen; set {name}={max(dense + 1, model.layers // 2)}"
            )
        if model.multi_token:
            raise ValueError(
                f"{asked}: a model with [model.multi_token] learns with all its layers; set "
                f"{name}=0"
            )

    def _check_head_learns(self) -> None:
        """Refuses a frozen head of zeros: no gradient would ever pass it."""
        if self.model.make or self.model.tied:
            return
        group = next(
            (each for each in self.optimizer.groups if fnmatchcase(HEAD, each.match)), None
        )
        if group is not None and group.frozen:
            raise ValueError(
                f"optimizer.groups freeze the head ({HEAD}), which is zero at first with "
                f"model.mup_base={self.model.mup_base}: no gradient passes it; set "
                "train.init_from=RUN, or let it learn"
            )
        also_trained = any(fnmatchcase(HEAD, name) for name in self.finetune.also_train)
        if self.finetune.has_adapters and not also_trained:
            raise ValueError(
                f"finetune.kind={self.finetune.kind!r} freezes the head, which is zero at first "
                f"with model.mup_base={self.model.mup_base}: no gradient passes it; set "
                f"train.init_from=RUN, or finetune.also_train={HEAD}"
            )

    def _check_sparsity(self) -> None:
        """Refuses settings under which weights would not stay zero, or are not chosen at all."""
        asked = f"sparsity.pattern={self.sparsity.pattern!r}"
        if self.finetune.has_adapters:
            raise ValueError(
                f"{asked}: an adapter adds a dense product to a frozen weight; set "
                "finetune.kind='full'"
            )
        for name in self._frozen_by_name():
            raise ValueError(
                f"{asked}: the frozen layers would lose weights and never make up for them; set "
                f"{name}=0"
            )
        if self.islands.are_several:
            raise ValueError(
                f"{asked}: each island would choose other weights, and a meeting averages them; "
                "set islands.count=1"
            )

    def _check_islands(self) -> None:
        """Refuses settings that islands do not have."""
        asked = f"islands.count={self.islands.count}"
        if self.train.epochs is not None:
            raise ValueError(
                f"{asked}: an epoch is one of all islands together; set train.steps instead of "
                "train.epochs"
            )
        if self.optimizer.ema is not None:
            raise ValueError(
                f"{asked}: each island would keep another average of the weights; set "
                "optimizer.ema='none'"
            )
        if isinstance(self.optimizer, ScheduleFreeAdamW):
            raise ValueError(
                f"{asked}: schedule_free_adamw keeps two copies of the weights, and a meeting "
                "moves one; set optimizer.name='adamw'"
            )
        if self.model.experts and self.model.experts.bias_rate:
            raise ValueError(
                f"{asked}: each island would keep other biases of its routers; set "
                "model.experts.bias_rate=0.0"
            )
        if self.guard.policy == "rollback":
            raise ValueError(
                f"{asked}: an island that goes back would meet the others at another step; set "
                "guard.policy='skip'"
            )

    def _check_stages(self) -> None:
        """Refuses settings that do not go with several stages."""
        if self.islands.are_several:
            raise ValueError(
                f"train.stages: each of islands.count={self.islands.count} islands reads its own "
                "share of every batch, of one size; set train.stages=[]"
            )
        if self.guard.replay_check:
            raise ValueError(
                f"guard.replay_check={self.guard.replay_check} repeats one compiled step, and "
                "train.stages have several; set guard.replay_check=0"
            )
        freezes = any(stage.frozen_layers is not None for stage in self.train.stages)
        if freezes and isinstance(self.optimizer, ScheduleFreeAdamW):
            raise ValueError(
                "train.stages: the average of schedule_free_adamw would go on moving while its "
                "layer is frozen; set optimizer.name='adamw' for stages with frozen_layers"
            )
        is_short = any(stage.pieces > 1 for stage in self.train.timetable)
        if is_short and self.data.packing == "best_fit":
            raise ValueError(
                "data.packing='best_fit' cuts no documents, and a stage of train.stages with its "
                "own sequence_length would; set data.packing='documents'"
            )

    def _check_distill(self) -> None:
        """Refuses settings that do not go with a teacher."""
        asked = self.distill.asked
        if self.distill.teacher is not None:
            self._check_teacher_on_mesh()
        else:
            self._check_saved_logits()
        if self.train.learns_pairs:
            raise ValueError(
                f"{asked} is for a loss of tokens, and train.preference="
                f"{self.train.preference!r} is one of answers; set train.preference='none'"
            )
        for name in ("label_smoothing", "z_loss"):
            if value := getattr(self.train, name):
                raise ValueError(
                    f"{asked}: train.{name}={value:g} shapes a loss without a teacher; set "
                    f"train.{name}=0.0"
                )
        if self.model.multi_token:
            raise ValueError(
                f"{asked}: a teacher predicts the next token alone; set model.multi_token='none'"
            )

    def _check_teacher_on_mesh(self) -> None:
        asked = self.distill.asked
        if self.mesh.pipeline != 1:
            raise ValueError(
                f"{asked}: the stages of mesh.pipeline={self.mesh.pipeline} hold parts of one "
                "model, and a teacher has other layers; set distill.logits, which `spmdtrain data "
                "teach` writes, or mesh.pipeline=1 and split by mesh.fsdp"
            )
        if self.islands.are_several:
            raise ValueError(
                f"{asked}: each of islands.count={self.islands.count} islands would hold the "
                "teacher; set distill.logits, which `spmdtrain data teach` writes, or "
                "islands.count=1"
            )

    def _check_saved_logits(self) -> None:
        """Refuses data whose tokens have no place in one corpus: logits are saved by place."""
        asked = self.distill.asked
        if self.data.mix:
            found = "data.mix draws from several"
        elif self.data.is_streamed:
            found = f"data.corpus={self.data.corpus!r} is a stream"
        elif self.own.data is not None:
            found = f"own.data={self.own.data!r} makes its own samples"
        else:
            return
        raise ValueError(
            f"{asked} lies beside the tokens of one corpus, and {found}; set distill.teacher, or "
            "data.corpus='tokens' without data.mix"
        )

    def in_stage(self, stage: TimedStage) -> "RunConfig":
        """Returns the settings of a run whose steps are all like those of one of its stages."""
        update = {"global_batch": stage.global_batch, "sequence_length": stage.sequence_length}
        train = self.train.model_copy(update=update | {"stages": ()})
        if stage.frozen_layers is None:
            return self.model_copy(update={"train": train})
        finetune = self.finetune.model_copy(update={"frozen_layers": stage.frozen_layers})
        return self.model_copy(update={"train": train, "finetune": finetune})

    def _check_delayed_scaling(self) -> None:
        """Refuses meshes on which no matmul returns the magnitudes that it has seen."""
        asked = "precision.scaling='delayed'"
        if self.mesh.pipeline != 1:
            raise ValueError(
                f"{asked}: the ticks of mesh.pipeline={self.mesh.pipeline} sum what a microbatch "
                "returns, and magnitudes have no sum; set precision.scaling='current'"
            )
        if self.mesh.collective_matmul:
            raise ValueError(
                f"{asked}: the pieces of mesh.collective_matmul=true are scaled by themselves; set "
                "mesh.collective_matmul=false, or precision.scaling='current'"
            )

    def _check_pairs(self) -> None:
        """Refuses settings that do not go with pairs of answers."""
        asked = f"train.preference={self.train.preference!r}"
        if self.data.corpus != "tokens" or self.data.mix or self.data.packing != "best_fit":
            raise ValueError(
                f"{asked} learns from token files of pairs, each in one sequence; set "
                "data.corpus='tokens' and data.packing='best_fit', without data.mix"
            )
        if self.train.label_smoothing or self.train.z_loss:
            raise ValueError(f"{asked} has no train.label_smoothing and no train.z_loss")

    def _too_long(self, length: int) -> str:
        """Returns the text that sequences are longer than the model allows, and how to extend
        rotary positions.
        """
        most = self.model.max_length
        said = f"train.sequence_length={length} is longer than model.max_length={most}"
        if self.model.positions != "rope" or self.model.rope_scaling:
            return said
        factor = -(-length // most)
        return (
            f"{said}; try --set model.max_length={factor * most} --set "
            f"model.rope_scaling.kind=yarn --set model.rope_scaling.factor={factor} --set "
            f"model.rope_scaling.original_length={most}"
        )

    def _check_steps(self) -> None:
        """Refuses settings that do not fit into `train.steps`."""
        warmup = self.optimizer.warmup
        if warmup > self.train.steps:
            raise ValueError(
                f"optimizer.warmup={warmup} is longer than train.steps={self.train.steps}"
            )
        if self.islands.are_several:
            self._check_last_meeting()
        last_choice = self.sparsity.until
        if last_choice is not None and last_choice > self.train.steps:
            raise ValueError(
                f"sparsity.until={last_choice} is beyond train.steps={self.train.steps}; "
                f"set sparsity.until={self.train.steps} or earlier"
            )
        first = self.compression.after
        if first is not None and first >= self.train.steps:
            raise ValueError(
                f"compression.after={first} leaves nothing to compress of train.steps="
                f"{self.train.steps}; set compression.after={self.train.steps // 3}"
            )
        late = [step for step in self.log.profile if step > self.train.steps]
        if late:
            raise ValueError(f"log.profile={late} is beyond train.steps={self.train.steps}")

    def _check_last_meeting(self) -> None:
        """Refuses a last step without a meeting: the islands would end with different weights."""
        islands, steps = self.islands, self.train.steps
        over = (steps - islands.after) % islands.interval
        if over or steps <= islands.after:
            fitting = max(steps - over, islands.after + islands.interval)
            raise ValueError(
                f"train.steps={steps}: islands meet after step {islands.after} every "
                f"{islands.interval} steps, and must after the last; set train.steps={fitting}"
            )


def check_config(config: Any) -> None:
    """Raises ConfigError if a caller passes something other than the settings of a run."""
    check_kind(config, RunConfig, "config", "st.load(FILE) or st.RunConfig(...)")
