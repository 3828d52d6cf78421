import jax
import pytest


@pytest.fixture
def tiles(monkeypatch):
    """`monkeypatch` for values that kernels read while they are traced.

    Nothing that was traced with another value is used again.
    """
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()
