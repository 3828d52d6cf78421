"""Makes the setup of a run that reads data."""

from collections.abc import Sequence
from typing import Any

import jax

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard


def shard_with_weights(
    config: RunConfig,
    make: MakeModel | str | None,
    devices: Sequence[jax.Device] | None,
    tokenizer: dict[str, Any] | None,
    **parts: Any,
) -> Setup:
    """Returns what `shard` does, with the weights of its teacher opened if the run has one.

    `tokenizer`: the spec of the tokenizer of the data, None if they are ids; `parts` as in `shard`.
    Raises ConfigError if the teacher has another tokenizer.
    """
    setup = shard(config, make, devices, **parts)
    if config.distill.teacher is None:
        return setup
    from spmdtrain.running.distillation.teacher_weights import check_teacher, with_teacher

    check_teacher(config, tokenizer)
    return with_teacher(setup)
