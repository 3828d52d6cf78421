import jax
import pytest


@pytest.fixture
def tiles(monkeypatch):
    """`monkeypatch`, for what kernels read while they are traced: nothing traced with another value is used again."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()
