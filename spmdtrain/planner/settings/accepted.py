"""Checks whether a run accepts a layout: one that it would refuse is not worth proposing."""

from functools import cache
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner.cost.workload import Workload


def settings_of(workload: Workload) -> list[str]:
    """Returns a layout as arguments of `--set`."""
    mesh = workload.mesh
    settings = [f"mesh.{axis}={size}" for axis, size in mesh.sizes.items()]
    settings += [
        f"train.microbatch={workload.microbatch}",
        f"train.remat={workload.remat_setting}",
        f"train.zero={workload.zero}",
    ]
    if workload.moments_on_host:
        settings.append("optimizer.memory=host")
    if mesh.pipeline > 1:
        settings += [
            f"pipeline.schedule={workload.schedule}",
            f"pipeline.chunks={workload.chunks}",
        ]
    if mesh.context > 1:
        settings.append(f"model.context_attention={workload.context_method}")
    if workload.model.experts and mesh.expert > 1:
        embed = "fsdp,expert" if workload.dense_over_expert else "fsdp"
        settings.append(f"rules.parameters.embed={embed}")
    if workload.model.experts and mesh.tensor > 1:
        owners = "expert,tensor" if workload.experts_over_tensor else "expert"
        settings.append(f"rules.parameters.experts={owners}")
    if workload.sequence_parallel:
        settings.append("rules.activations.stream_time=context,tensor")
        settings.append(f"mesh.collective_matmul={str(workload.collective_matmul).lower()}")
    return settings


class Accepted:
    """A check whether a run of `config` would accept a layout.

    `refusal` is the error for the last refused layout. Settings are checked together as a run
    checks them, once for all layouts that split over the same axes in the same way. Sizes that must
    divide each other are up to the caller.
    """

    def __init__(self, config: RunConfig):
        self.refusal: ConfigError | None = None
        self._config = config
        self._values = resolved(config)
        self._of_kind: dict[tuple, ConfigError | None] = {}
        self._of_blocks: dict[tuple, ConfigError | None] = {}
        self._model = cache(self._build)

    def __call__(self, workload: Workload) -> bool:
        """Returns True if a run would accept this layout."""
        kind = _kind(workload)
        if kind not in self._of_kind:
            self._of_kind[kind] = self._refusal(workload)
        refusal = self._of_kind[kind] or self._refusal_of_parts(workload)
        self.refusal = refusal or self.refusal
        return refusal is None

    def _refusal(self, workload: Workload) -> ConfigError | None:
        try:
            from_resolved(self._values, settings_of(workload))
        except ConfigError as error:
            return error
        return None

    def _refusal_of_parts(self, workload: Workload) -> ConfigError | None:
        """Returns the error for more microbatches than can be summed, or for a device whose part
        of a matmul in blocks has no whole ones.

        The config accepts the settings of the layout.
        """
        try:
            self._config.precision.check_sum(workload.accumulation)
        except ConfigError as error:
            return error
        if not self._config.precision.in_blocks:
            return None
        parts = workload.mesh, workload.microbatch, workload.sequence_parallel
        if parts not in self._of_blocks:
            self._of_blocks[parts] = self._refusal_of_blocks(workload)
        return self._of_blocks[parts]

    def _refusal_of_blocks(self, workload: Workload) -> ConfigError | None:
        from spmdtrain.parallel.axes import make_rules

        own = from_resolved(self._values, settings_of(workload))
        rules = make_rules(own.rules, workload.mesh.sizes)
        sequences = workload.microbatch * workload.mesh.batch_shards
        try:
            self._model().check_blocks(rules, sequences, workload.train.sequence_length)
        except ConfigError as error:
            return error
        return None

    def _build(self) -> Any:
        from spmdtrain.models.abstract import build_model
        from spmdtrain.models.choose import choose_model

        return build_model(*choose_model(self._config))


def _kind(workload: Workload) -> tuple:
    """Returns the settings that layouts of one kind share: all but sizes."""
    is_split = (size > 1 for size in workload.mesh.sizes.values())
    return (
        *is_split,
        workload.schedule,
        workload.chunks > 1,
        workload.remat_setting,
        workload.zero,
        workload.moments_on_host,
        workload.context_method,
        workload.dense_over_expert,
        workload.experts_over_tensor,
        workload.sequence_parallel,
        workload.collective_matmul,
    )
