"""All sections together. The file of each says which other settings it cannot be combined with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from spmdtrain.config.arguments import as_whole, check_kind
from spmdtrain.config.schema import (
    checkpoint,
    compression,
    distill,
    finetune,
    guard,
    islands,
    log,
    optimizer,
    precision,
    sparsity,
    train,
)
from spmdtrain.config.schema.checkpoint import CheckpointConfig
from spmdtrain.config.schema.compression import CompressionConfig
from spmdtrain.config.schema.data import DataConfig
from spmdtrain.config.schema.distill import DistillConfig
from spmdtrain.config.schema.eval import EvalConfig
from spmdtrain.config.schema.finetune import FinetuneConfig
from spmdtrain.config.schema.guard import GuardConfig
from spmdtrain.config.schema.islands import IslandsConfig
from spmdtrain.config.schema.kernels import KernelsConfig
from spmdtrain.config.schema.log import LogConfig
from spmdtrain.config.schema.mesh import MeshConfig
from spmdtrain.config.schema.model import GPT, Llama, mup, transformer
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
from spmdtrain.config.schema.own import OwnConfig
from spmdtrain.config.schema.pipeline import PipelineConfig
from spmdtrain.config.schema.precision import PrecisionConfig
from spmdtrain.config.schema.rules import RulesConfig
from spmdtrain.config.schema.sparsity import SparsityConfig
from spmdtrain.config.schema.train import TrainConfig
from spmdtrain.config.settings import Settings
from spmdtrain.config.stage_timetable import TimedStage

# Yields the refusals of a section, as texts. The run is `Any`: its class is made of the
# sections, which cannot import it.
Refusals = Callable[[Any], Iterator[str]]
# Those that need the number of steps, which is not known while `train.epochs` counts them.
OF_STEPS: tuple[Refusals, ...] = (
    optimizer.refusals_of_steps,
    islands.refusals_of_steps,
    sparsity.refusals_of_steps,
    compression.refusals_of_steps,
    log.refusals_of_steps,
)


def _refusals_of_steps(run: "RunConfig") -> Iterator[str]:
    if run.train.epochs is None:
        for refusals_of in OF_STEPS:
            yield from refusals_of(run)


# In this order: a person reads the first that applies.
REFUSALS: tuple[Refusals, ...] = (
    transformer.refusals_of_indexers,
    train.refusals_of_length,
    train.refusals_of_memory,
    guard.refusals_of_rollback,
    checkpoint.refusals,
    guard.refusals_of_routers,
    finetune.refusals,
    transformer.refusals_of_pipelines,
    sparsity.refusals,
    islands.refusals_of_sparsity,
    compression.refusals,
    precision.refusals,
    train.refusals_of_pairs,
    islands.refusals,
    distill.refusals_of_pipelines,
    islands.refusals_of_teachers,
    distill.refusals,
    islands.refusals_of_stages,
    train.refusals_of_stages,
    optimizer.refusals_of_batches,
    _refusals_of_steps,
    mup.refusals,
    optimizer.refusals,
)


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
        """Returns the model section; `max_length` is that of training unless it is set."""
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
        counted._refuse(OF_STEPS)
        return counted

    def other_runs(self) -> dict[str, str]:
        """Returns the folders of other runs, or of published models, by the setting for each."""
        sections = {name: getattr(self, name).other_runs() for name in type(self).model_fields}
        return {
            f"{section}.{setting}": folder
            for section, folders in sections.items()
            for setting, folder in folders.items()
            if folder is not None
        }

    @property
    def beside_tokens(self) -> str | None:
        """The setting that names arrays beside the tokens of a corpus, with its value, for
        messages; None: there are no such arrays.
        """
        return None if self.distill.logits is None else self.distill.source

    def own_samples(self, ids: Any) -> Any:
        """Returns the global indices of the samples number `ids` that this run reads."""
        return self.islands.own_samples(ids)

    def check_repeatable(self) -> None:
        """Raises ConfigError if the files of the run do not suffice to repeat its steps."""
        islands.check_repeatable(self)

    def check_alone(self) -> None:
        """Raises ConfigError if the run is one of several that train together."""
        islands.check_alone(self)

    @property
    def eval_windows(self) -> int | None:
        """The windows of each validation split that an evaluation uses; None: all."""
        batches = self.eval.batches
        return None if batches is None else batches * self.train.global_batch

    @model_validator(mode="after")
    def _check(self):
        self._refuse(REFUSALS)
        return self

    def _refuse(self, refusals: Sequence[Refusals]) -> None:
        """Raises ValueError with the first of these refusals."""
        for refusals_of in refusals:
            for text in refusals_of(self):
                raise ValueError(text)

    @property
    def frozen_in_stack(self) -> int:
        """The number of frozen layers in the stack: `finetune.frozen_layers` without the dense
        ones.
        """
        dense = self.model.layers - self.model.stack_layers
        return max(0, self.finetune.frozen_layers - dense)

    @property
    def always_frozen(self) -> int:
        """The number of first layers that stay frozen through all stages of the run."""
        stages = self.train.timetable
        return min(self.in_stage(stage).finetune.frozen_layers for stage in stages)

    def in_stage(self, stage: TimedStage) -> "RunConfig":
        """Returns the settings of a run that consists of this stage alone."""
        update = {"global_batch": stage.global_batch, "sequence_length": stage.sequence_length}
        train = self.train.model_copy(update=update | {"stages": ()})
        if stage.frozen_layers is None:
            return self.model_copy(update={"train": train})
        finetune = self.finetune.model_copy(update={"frozen_layers": stage.frozen_layers})
        return self.model_copy(update={"train": train, "finetune": finetune})


def check_config(config: Any) -> None:
    """Raises ConfigError if a caller passes something other than the settings of a run."""
    check_kind(config, RunConfig, "config", "st.load(FILE) or st.RunConfig(...)")
