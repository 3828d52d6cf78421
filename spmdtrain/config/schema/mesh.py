"""[mesh]: devices along each axis."""

from pydantic import Field, model_validator

from spmdtrain.config.settings import Settings

# Slowest link first.
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


class MeshConfig(Settings):
    """The number of devices along each mesh axis, slowest link first.

    Their product is the device count.

    1 switches an axis off. One axis may be -1: it takes all remaining devices.
    """

    pipeline: int = Field(default=1, description="layers are split into stages")
    data: int = Field(default=1, description="batch is split, parameters are copied")
    fsdp: int = Field(default=1, description="batch is split, parameters are split too (ZeRO-3)")
    expert: int = Field(
        default=1, description="batch is split; experts of a mixture are distributed"
    )
    context: int = Field(default=1, description="sequence is split")
    tensor: int = Field(
        default=1, description="heads, ffn and vocabulary are split; needs the fastest links"
    )
    collective_matmul: bool = Field(
        default=False,
        description="overlap each matmul over tensor with the gather or scatter of its tokens; "
        "needs rules.activations.stream_time = context,tensor",
    )
    elastic: bool = Field(
        default=True,
        description="a run resumed on another number of devices may change the sizes of data and "
        "fsdp; global batch and order of the samples stay the same",
    )

    @model_validator(mode="after")
    def _check(self):
        sizes = self.sizes
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(
                    f"mesh.{axis}={size}: an axis spans at least 1 device (or -1: fill)"
                )
        filled = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
        if len(filled) > 1:
            raise ValueError(f"{' and '.join(filled)} are both -1; only one axis can be filled")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """The devices along each axis, in mesh order (slowest link first)."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}
