"""[eval]: when a run is evaluated, on how much, and when it stops early."""

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, CountOrZero, NonNegative, Settings, Strings


class EvalConfig(Settings):
    """The interval between evaluations, and how much of the validation split they use."""

    every: CountOrZero = Field(
        default=0, description="steps between evaluations, with one more at the end; 0: never"
    )
    batches: Count | None = Field(
        default=None,
        description="validation batches of train.global_batch windows; default: the whole split",
    )
    at_start: bool = Field(
        default=False,
        description="also evaluate before the first step, as with train.init_from always",
    )
    patience: Count | None = Field(
        default=None,
        description="evaluations in a row without a better eval_loss after which the run stops; "
        "default: it never does",
    )
    min_delta: NonNegative = Field(
        default=0.0,
        description="nats by which an eval_loss must be below the best one to count as better",
    )

    tasks: Strings = Field(
        default=(),
        description="tasks of lm-evaluation-harness to run as well, with the current weights; "
        "their figures are called task/TASK/METRIC",
    )
    tasks_every: Count = Field(
        default=1, description="evaluations from one run of the tasks to the next"
    )
    task_examples: Count | None = Field(
        default=None, description="examples of each task; default: all"
    )

    @model_validator(mode="after")
    def _check(self):
        if not self.tasks and (self.tasks_every > 1 or self.task_examples):
            raise ValueError(
                "eval.tasks_every and eval.task_examples have no effect without eval.tasks; set it"
            )
        for name in ("at_start", "patience", "tasks"):
            if getattr(self, name) and not self.every:
                raise ValueError(
                    f"eval.{name} needs evaluations, and eval.every=0 asks for none; set eval.every"
                )
        if self.min_delta and not self.patience:
            raise ValueError(
                f"eval.min_delta={self.min_delta:g} has no effect without eval.patience"
            )
        return self
