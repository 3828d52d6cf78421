"""Memory of the host that devices read and write directly: where arrays may rest between steps."""

import jax

KIND = "pinned_host"  # the name that jax gives it


def rests_there(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns True for an array, concrete or abstract, that rests on the host."""
    return x.sharding is not None and x.sharding.memory_kind == KIND


def on_device(x: jax.Array) -> jax.Array:
    """Returns the traced x in the memory of the device, if it is in that of the host."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def on_host(x: jax.Array) -> jax.Array:
    """Returns the traced x in the memory of the host."""
    return jax.device_put(x, jax.memory.Space.Host)
