"""Memory of the host that devices of its own read where it is."""

import jax
import numpy as np
import pytest

from spmdtrain.parallel.host import empty


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 1000, 7)])
def test_an_array_that_is_filled_in_place_is_not_copied(shape, dtype):
    x = empty(shape, jax.numpy.dtype(dtype))
    x[...] = 3
    assert x.shape == shape and x.dtype == dtype
    on_device = jax.device_put(x, jax.devices()[0])
    assert on_device.unsafe_buffer_pointer() == x.ctypes.data
    assert np.array_equal(np.asarray(on_device), x)
