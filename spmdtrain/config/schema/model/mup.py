"""Refuses the settings that cannot be combined with `model.mup_base`."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

HEAD = "unembed_ve"  # the path of an untied head


def refusals(run: Any) -> Iterator[str]:
    """Yields the settings that cannot be combined with muP."""
    if run.model.mup_base is None:
        return
    if not run.optimizer.has_width_rule:
        yield (
            f"model.mup_base={run.model.mup_base}: muP knows no rates of "
            f"optimizer.name={run.optimizer.name!r}; set optimizer.name='adamw', 'lion' or "
            "'muon'"
        )
    if not (run.train.init_from or run.model.make or run.model.tied):
        yield from _of_frozen_head(run)


def _of_frozen_head(run: Any) -> Iterator[str]:
    """Yields the setting that freezes a head of zeros: no gradient would ever pass it."""
    groups = run.optimizer.groups
    group = next((group for group in groups if fnmatchcase(HEAD, group.match)), None)
    if group is not None and group.frozen:
        yield (
            f"optimizer.groups freeze the head ({HEAD}), which is zero at first with "
            f"model.mup_base={run.model.mup_base}: no gradient passes it; set "
            "train.init_from=RUN, or let it learn"
        )
    also_trained = any(fnmatchcase(HEAD, name) for name in run.finetune.also_train)
    if run.finetune.has_adapters and not also_trained:
        yield (
            f"finetune.kind={run.finetune.kind!r} freezes the head, which is zero at first "
            f"with model.mup_base={run.model.mup_base}: no gradient passes it; set "
            f"train.init_from=RUN, or finetune.also_train={HEAD}"
        )
